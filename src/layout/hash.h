/* Hashes of tensors; the functions are declared in tensorbus.h and plan.h. */
#ifndef TB_LAYOUT_HASH_H
#define TB_LAYOUT_HASH_H

#include "tensorbus/plan.h"

/* For tests: disables vector instructions, or enables them again. Not while anything is hashed. */
void tb__hash_force_portable(bool is_forced);

#endif
