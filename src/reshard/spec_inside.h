/* Shared by the files that implement reshard/spec.h. */
#ifndef TB_RESHARD_SPEC_INSIDE_H
#define TB_RESHARD_SPEC_INSIDE_H

#include "reshard/spec.h"

#include <jansson.h>

/* Refuses keys that are not in the list, which ends with NULL. */
tb_status tb__spec_check_keys(const json_t *json, const char *const *keys);

/* Reads the quantisations of both sides from the rule's JSON; its dtypes have been read. */
tb_status tb__spec_read_quants(const json_t *json, bool is_pattern, tb__spec_rule *rule, tb__arena *arena);

/* "layers" and "experts" of a mesh whose dims have these names, which may be NULL. */
tb_status tb__spec_read_numbers(const json_t *json, int ndim, const int64_t *shape, const char *const *names,
                                tb__spec_mesh *mesh, tb__arena *arena);

#endif
