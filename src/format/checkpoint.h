/* Checkpoints: a model in one safetensors file or in several, as Hugging Face lays them out, and sets of files with the
 * part of each rank.
 *
 *     FILE                                     a file of any name
 *     DIR/model.safetensors                    all in one; comes first if there is an index, too
 *     DIR/model.safetensors.index.json         "weight_map" says which tensor is in which file of the directory
 *     DIR/rank_0.safetensors, rank_1...        what each rank holds
 *     DIR/model-rank-0-part-0.safetensors, ... the same as vLLM's sharded_state has it: one file for a rank, or several
 */
#ifndef TB_FORMAT_CHECKPOINT_H
#define TB_FORMAT_CHECKPOINT_H

#include "format/safetensors.h"

#include <dirent.h>

typedef enum tb__checkpoint_kind {
    TB__CHECKPOINT_FILE,
    TB__CHECKPOINT_MODEL,
    TB__CHECKPOINT_INDEX,
    TB__CHECKPOINT_RANKS,
} tb__checkpoint_kind;

/* Detects the kind; TB_INVALID if it is none of these. */
tb_status tb__checkpoint_look(const char *path, tb__checkpoint_kind *out);

/* ---- Models (checkpoint.c) ----------------------------------------------------------------------------------- */

typedef struct tb__checkpoint_tensor {
    const tb__safetensor *tensor;
    size_t file;
} tb__checkpoint_tensor;

/* A tensor in the directory of a model that is not part of the model. */
typedef struct tb__unindexed {
    const char *file;       /* its name */
    const char *name;       /* of the tensor; NULL: the file can't be read */
    const char *indexed_in; /* the file in which the model has a tensor of this name; NULL: it has none */
} tb__unindexed;

/* All tensors of a model, whichever files they are in. Files stay open. */
typedef struct tb__checkpoint {
    tb__checkpoint_kind kind;
    size_t nfiles;
    tb__safetensors **files; /* by name */
    size_t count;
    const tb__checkpoint_tensor *tensors; /* by name */
    int64_t nbytes;                       /* of them all */
    int64_t index_nbytes;                 /* metadata.total_size of the index; -1: missing */
    size_t nunindexed;
    const tb__unindexed *unindexed; /* each once; those that the model does not have come first */
    tb__arena arena;
} tb__checkpoint;

/* Opens every file, and finds every tensor of the index in the file it names. Other tensors in these files and in other
 * *.safetensors files of the directory are listed as unindexed: transformers ignores them. So are tensors in other
 * files, or in an index, beside model.safetensors. total_size is not checked, because it is wrong in published
 * models. */
tb_status tb__checkpoint_open(const char *path, tb__checkpoint **out);

/* TB_INVALID, with a message that names the first, if there are unindexed tensors. */
tb_status tb__checkpoint_refuse_unindexed(const tb__checkpoint *checkpoint, const char *dir);
void tb__checkpoint_close(tb__checkpoint *checkpoint); /* accepts NULL */

/* Whether it is called *.safetensors and is not hidden; for scandir. */
int tb__checkpoint_is_part(const struct dirent *entry);

/* NULL if it is not there. */
const tb__checkpoint_tensor *tb__checkpoint_find(const tb__checkpoint *checkpoint, const char *name);

/* ---- Sets of rank files (rank_files.c) ----------------------------------------------------------------------- */

typedef struct tb__rank_file {
    int32_t rank;
    const char *path;
} tb__rank_file;

typedef struct tb__rank_files {
    size_t count;
    const tb__rank_file *files; /* by rank; there may be gaps, and several of a rank */
    size_t nothers;             /* *.safetensors files of no rank */
    const char **others;        /* their names, by strcmp */
    tb__arena arena;
} tb__rank_files;

/* Lists the ranks that have a file; opens none. A name like rank_07.safetensors, which is not the name of any rank's
 * file, is an error. */
tb_status tb__rank_files_init(const char *dir, tb__rank_files *out);
void tb__rank_files_fini(tb__rank_files *files);

/* DIR/rank_R.safetensors, or the first file that vLLM has for the rank; to be freed by the caller. */
tb_status tb__rank_file_path(const char *dir, int32_t rank, char **out);
tb_status tb__vllm_file_path(const char *dir, int32_t rank, char **out);

/* ---- Writing models (checkpoint_writer.c) -------------------------------------------------------------------- */

/* A model that is being written. None of its files has its name until all are complete, and the index is last. */
typedef struct tb__checkpoint_writer tb__checkpoint_writer;

/* Assigns the tensors to files in the order given, one file after the other, each with at most max_file_nbytes of data;
 * 0 means no limit. A tensor that is larger has a file of its own. One file is model.safetensors, several are
 * model-00001-of-00003.safetensors and so on, with an index: all as huggingface_hub does it. Each file has the
 * metadata.
 *
 * Makes the directory if it is not there. TB_REFUSED if another run writes into it, or if it holds files of a
 * checkpoint: old and new files would be mixed. Files that killed runs left there are removed and counted. */
tb_status tb__checkpoint_create(const char *dir, const tb__safetensor *tensors, size_t count,
                                const tb__safetensors_metadata *metadata, size_t nmetadata, int64_t max_file_nbytes,
                                tb__leftovers *removed, tb__checkpoint_writer **out);

/* As for one file: parts in any order, from any threads, each byte once. */
tb_status tb__checkpoint_write(tb__checkpoint_writer *writer, size_t i, int64_t offset, const void *bytes,
                               size_t nbytes);
tb_status tb__checkpoint_read_back(const tb__checkpoint_writer *writer, size_t i, int64_t offset, size_t nbytes,
                                   void *buffer);
tb_status tb__checkpoint_commit(tb__checkpoint_writer *writer, bool sync);

/* Removes all files of a model that was not committed. Accepts NULL. */
void tb__checkpoint_writer_destroy(tb__checkpoint_writer *writer);

#define TB__MODEL_FILE  "model.safetensors"
#define TB__MODEL_INDEX "model.safetensors.index.json"

#endif
