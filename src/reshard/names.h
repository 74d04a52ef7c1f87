/* Names, as far as files of the library share them. */
#ifndef TB_RESHARD_NAMES_H
#define TB_RESHARD_NAMES_H

#include "base/error.h"

uint64_t tb__name_hash(const char *name);

/* As tb_match_names, for sides that messages call otherwise than "the source" and "the target". */
tb_status tb__match_names(const char *const *source, size_t nsource, const char *const *target, size_t ntarget,
                          const tb_match_opts *opts, const char *source_label, const char *target_label, tb_match *out);

#endif
