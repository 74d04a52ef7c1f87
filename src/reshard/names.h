/* Names, as far as files of the library share them. */
#ifndef TB_RESHARD_NAMES_H
#define TB_RESHARD_NAMES_H

#include "base/error.h"

uint64_t tb__name_hash(const char *name);

#endif
