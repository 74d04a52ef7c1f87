/* The target of a resharding: a file for each rank, or a model. Files get their final names when all are complete. */
#include "reshard/disk_inside.h"

#include "format/folder.h"

#include <string.h>
#include <unistd.h>

typedef struct rank_file {
    int32_t rank;
    char *path; /* kept, so that the file can be removed without allocating memory */
    tb__safetensors_writer *writer;
    bool is_committed;
    TB_VEC(size_t) slots; /* of the job, ascending; the index is that of the file's tensor */
} rank_file;

struct tb__disk_output {
    tb__checkpoint_writer *model; /* NULL: files of ranks */
    tb__folder folder;            /* of the ranks' files */
    bool is_committed;
    size_t nranks;
    rank_file *ranks; /* ascending */
    tb__arena arena;  /* names in the files of ranks */
};

/* Tensors of one rank, as its file will have them. */
static tb_status list_tensors(const tb__disk *disk, rank_file *file, tb__safetensor *out, tb__arena *arena) {
    for (size_t i = 0; i < disk->count; i++) {
        const tb__disk_tensor *t = &disk->tensors[i];
        tb__safetensor part[TB__DISK_SLOTS];
        if (tb_layout_index_of(t->dst, file->rank) < 0)
            continue;
        TB_TRY(tb__disk_part_tensors(t, file->rank, part));
        for (size_t k = 0; k < TB__DISK_SLOTS; k++) {
            if (!part[k].name)
                continue;
            TB_TRY(tb__spec_local_name(&disk->spec->dst_mesh, file->rank, part[k].name, arena, &part[k].name));
            out[file->slots.count] = part[k];
            if (!tb__vec_push(&file->slots, TB__DISK_SLOTS * i + k))
                return TB_NO_MEMORY;
        }
    }
    for (size_t i = 0; i < disk->spec->nconstants; i++)
        out[file->slots.count + i] = (tb__safetensor){.name = disk->spec->constants[i].name, .dtype = TB_F32};
    return TB_OK;
}

/* Those of the spec come after the tensors. */
static tb_status write_constants(const tb__disk_output *output, const rank_file *file, const tb__spec *spec) {
    for (size_t i = 0; i < spec->nconstants; i++) {
        const float *value = &spec->constants[i].value;
        TB_TRY(output->model ? tb__checkpoint_write(output->model, file->slots.count + i, 0, value, sizeof *value)
                             : tb__safetensors_write(file->writer, file->slots.count + i, 0, value, sizeof *value));
    }
    return TB_OK;
}

/* Takes the metadata of the source. Programs that load models look for the library that wrote the tensors. */
static tb_status list_metadata(const tb__disk *disk, bool is_model, tb__safetensors_metadata **out, size_t *count) {
    const tb__safetensors *first = tb__disk_input_first(disk->input);
    size_t n = first ? first->header.nmetadata : 0;
    bool has_format = false;
    tb__safetensors_metadata *metadata = tb__malloc(n + 1, sizeof *metadata);
    if (!metadata)
        return TB_NO_MEMORY;
    for (size_t i = 0; i < n; i++) {
        metadata[i] = first->header.metadata[i];
        has_format |= strcmp(metadata[i].key, "format") == 0;
    }
    if (is_model && !has_format)
        metadata[n++] = (tb__safetensors_metadata){"format", "pt"};
    *out = metadata;
    *count = n;
    return TB_OK;
}

static tb_status create_rank(tb__disk_output *output, rank_file *file, bool for_vllm, const tb__safetensor *tensors,
                             size_t count, const tb__safetensors_metadata *metadata, size_t nmetadata) {
    TB_TRY((for_vllm ? tb__vllm_file_path : tb__rank_file_path)(output->folder.path, file->rank, &file->path));
    return tb__safetensors_create(file->path, tensors, count, metadata, nmetadata, &file->writer);
}

static tb_status create_files(tb__disk_output *output, const tb__disk *disk, const char *dir, const tb__disk_opts *opts,
                              tb__safetensor *tensors, const tb__safetensors_metadata *metadata, size_t nmetadata) {
    tb__leftovers unused = {0}, *removed = opts->removed ? opts->removed : &unused;
    if (opts->files != TB__SPEC_HF) {
        TB_TRY(tb__folder_take(&output->folder, dir));
        TB_TRY(tb__folder_clear(&output->folder, NULL, 0, removed));
    }
    for (size_t i = 0; i < disk->nranks; i++) {
        rank_file *file = &output->ranks[output->nranks++];
        file->rank = disk->ranks[i];
        TB_TRY(list_tensors(disk, file, tensors, &output->arena));
        size_t count = file->slots.count + disk->spec->nconstants;
        if (opts->files == TB__SPEC_HF)
            TB_TRY(tb__checkpoint_create(dir, tensors, count, metadata, nmetadata, opts->max_file_bytes, removed,
                                         &output->model));
        else
            TB_TRY(create_rank(output, file, opts->files == TB__SPEC_VLLM, tensors, count, metadata, nmetadata));
        TB_TRY(write_constants(output, file, disk->spec));
    }
    return TB_OK;
}

static tb_status init_output(tb__disk_output *output, const tb__disk *disk, const char *dir,
                             const tb__disk_opts *opts) {
    tb__safetensors_metadata *metadata;
    size_t nmetadata;
    if (opts->files == TB__SPEC_HF && disk->nranks != 1)
        return tb__fail(TB_INVALID, "a model is written by one target rank, but the spec has %zu", disk->nranks);
    output->ranks = tb__calloc(disk->nranks, sizeof *output->ranks);
    tb__safetensor *tensors = tb__malloc(TB__DISK_SLOTS * disk->count + disk->spec->nconstants, sizeof *tensors);
    tb_status status = output->ranks && tensors ? TB_OK : TB_NO_MEMORY;
    if (status == TB_OK)
        status = list_metadata(disk, opts->files == TB__SPEC_HF, &metadata, &nmetadata);
    if (status == TB_OK) {
        status = create_files(output, disk, dir, opts, tensors, metadata, nmetadata);
        free(metadata);
    }
    free(tensors);
    return status;
}

tb_status tb__disk_output_create(const tb__disk *disk, const char *dir, const tb__disk_opts *opts,
                                 tb__disk_output **out) {
    tb__disk_output *output = tb__calloc(1, sizeof *output);
    if (!output)
        return TB_NO_MEMORY;
    tb_status status = init_output(output, disk, dir, opts);
    if (status != TB_OK)
        tb__disk_output_destroy(output);
    else
        *out = output;
    return status;
}

static int compare_ranks(const void *left, const void *right) {
    const rank_file *a = left, *b = right;
    return (a->rank > b->rank) - (a->rank < b->rank);
}

static int compare_sizes(const void *left, const void *right) {
    size_t a = *(const size_t *)left, b = *(const size_t *)right;
    return (a > b) - (a < b);
}

/* Finds a rank's file, and the index of the tensor in it. */
static const rank_file *find_rank_file(const tb__disk_output *output, int32_t rank, size_t slot, size_t *place) {
    const rank_file key = {.rank = rank};
    const rank_file *file = bsearch(&key, output->ranks, output->nranks, sizeof key, compare_ranks);
    const size_t *at = bsearch(&slot, file->slots.item, file->slots.count, sizeof slot, compare_sizes);
    *place = (size_t)(at - file->slots.item);
    return file;
}

tb_status tb__disk_output_write(tb__disk_output *output, int32_t rank, size_t slot, int64_t offset, const void *bytes,
                                size_t nbytes) {
    size_t i;
    const rank_file *file = find_rank_file(output, rank, slot, &i);
    return output->model ? tb__checkpoint_write(output->model, i, offset, bytes, nbytes)
                         : tb__safetensors_write(file->writer, i, offset, bytes, nbytes);
}

tb_status tb__disk_output_read(const tb__disk_output *output, int32_t rank, size_t slot, int64_t offset, void *buffer,
                               size_t nbytes) {
    size_t i;
    const rank_file *file = find_rank_file(output, rank, slot, &i);
    return output->model ? tb__checkpoint_read_back(output->model, i, offset, nbytes, buffer)
                         : tb__safetensors_read_back(file->writer, i, offset, nbytes, buffer);
}

tb_status tb__disk_output_commit(tb__disk_output *output, bool sync) {
    if (output->model)
        return tb__checkpoint_commit(output->model, sync);
    for (size_t i = 0; i < output->nranks; i++)
        TB_TRY(tb__safetensors_finish(output->ranks[i].writer, sync));
    for (size_t i = 0; i < output->nranks; i++) {
        TB_TRY(tb__safetensors_commit(output->ranks[i].writer));
        output->ranks[i].is_committed = true;
    }
    output->is_committed = true;
    return tb__folder_keep(&output->folder, sync);
}

void tb__disk_output_destroy(tb__disk_output *output) {
    if (!output)
        return;
    for (size_t i = 0; i < output->nranks; i++) {
        rank_file *file = &output->ranks[i];
        if (file->is_committed && !output->is_committed)
            unlink(file->path);
        tb__safetensors_writer_destroy(file->writer);
        free(file->path);
        free(file->slots.item);
    }
    tb__checkpoint_writer_destroy(output->model);
    tb__folder_fini(&output->folder);
    tb__arena_fini(&output->arena);
    free(output->ranks);
    free(output);
}
