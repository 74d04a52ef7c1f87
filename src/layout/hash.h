/* Hashes of tensors, of which tensorbus.h and plan.h have the functions. */
#ifndef TB_LAYOUT_HASH_H
#define TB_LAYOUT_HASH_H

#include "tensorbus/plan.h"

/* Tests: without vectors from now on. Not while anything is hashed. */
void tb__hash_force_portable(bool is_forced);

#endif
