/* Functions for names that files of the library share. */
#ifndef TB_RESHARD_NAMES_H
#define TB_RESHARD_NAMES_H

#include "base/error.h"

uint64_t tb__name_hash(const char *name);

/* As tb_match_names, with other words for "the source" and "the target" in messages. */
tb_status tb__match_names(const char *const *source, size_t nsource, const char *const *target, size_t ntarget,
                          const tb_match_opts *opts, const char *source_label, const char *target_label, tb_match *out);

#endif
