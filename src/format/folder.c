/* The directory that a checkpoint is written into: one run at a time, and no other checkpoint's files beside its own.
 */
#include "format/folder.h"

#include "base/mem.h"
#include "format/checkpoint.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

static tb_status fail_busy(const char *path) {
    return tb__file_fail(TB_REFUSED, path, "another run writes into this directory");
}

static tb_status lock(tb__folder *folder) {
    folder->fd = open(folder->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder->fd < 0 && errno == ENOTDIR)
        return tb__file_fail(TB_INVALID, folder->path, "it is not a directory");
    if (folder->fd < 0)
        return tb__file_fail_errno(TB_IO, folder->path, "can't be opened");
    if (flock(folder->fd, LOCK_EX | LOCK_NB) != 0) {
        bool is_busy = errno == EWOULDBLOCK;
        folder->is_new = folder->is_new && !is_busy; /* it belongs to the run that has the lock */
        return is_busy ? fail_busy(folder->path) : tb__file_fail_errno(TB_IO, folder->path, "can't be locked");
    }
    /* A run that failed may have removed the directory that it had made, after we opened it. */
    struct stat here, locked;
    if (stat(folder->path, &here) == 0 && fstat(folder->fd, &locked) == 0 && here.st_ino == locked.st_ino &&
        here.st_dev == locked.st_dev)
        return TB_OK;
    folder->is_new = false;
    return fail_busy(folder->path);
}

tb_status tb__folder_take(tb__folder *folder, const char *path) {
    tb__folder taken = {.fd = -1, .path = tb__strdup(path)};
    if (!taken.path)
        return TB_NO_MEMORY;
    taken.is_new = mkdir(path, 0777) == 0;
    tb_status status =
        taken.is_new || errno == EEXIST ? lock(&taken) : tb__file_fail_errno(TB_IO, path, "can't be created");
    if (status != TB_OK)
        tb__folder_fini(&taken);
    else
        *folder = taken;
    return status;
}

void tb__folder_fini(tb__folder *folder) {
    if (folder->is_new)
        rmdir(folder->path);
    if (folder->path && folder->fd >= 0)
        close(folder->fd);
    free(folder->path);
    *folder = (tb__folder){.fd = -1};
}

tb_status tb__folder_keep(tb__folder *folder, bool sync) {
    bool was_new = folder->is_new;
    folder->is_new = false;
    if (!sync)
        return TB_OK;
    if (fsync(folder->fd) != 0 && errno != EINVAL) /* some file systems have nothing to sync there */
        return tb__file_fail_errno(TB_IO, folder->path, "can't be written to the disk");
    return was_new ? tb__file_sync_name(folder->path) : TB_OK;
}

/* ---- Existing files ------------------------------------------------------------------------------------------ */

typedef struct name_list {
    char text[112];
    size_t length, count;
} name_list;

static void add_name(name_list *list, const char *name) {
    enum { MOST = 2, LONGEST = 48 };
    if (list->count++ < MOST)
        list->length += (size_t)snprintf(list->text + list->length, sizeof list->text - list->length, "%s%.*s",
                                         list->length ? ", " : "", LONGEST, name);
    else if (list->count == MOST + 1)
        snprintf(list->text + list->length, sizeof list->text - list->length, ", ...");
}

static int is_checkpoint_file(const struct dirent *e) {
    return tb__checkpoint_is_part(e) || strcmp(e->d_name, TB__MODEL_INDEX) == 0;
}

static tb_status list_names(const char *path, int (*wanted)(const struct dirent *), const char *const *own, size_t nown,
                            name_list *out) {
    struct dirent **entries;
    int n = scandir(path, &entries, wanted, alphasort);
    if (n < 0)
        return tb__file_fail_errno(TB_IO, path, "can't be listed");
    for (int i = 0; i < n; i++) {
        bool is_own = false;
        for (size_t k = 0; k < nown && !is_own; k++)
            is_own = strcmp(own[k], entries[i]->d_name) == 0;
        if (!is_own)
            add_name(out, entries[i]->d_name);
        free(entries[i]);
    }
    free(entries);
    return TB_OK;
}

tb_status tb__folder_clear(const tb__folder *folder, const char *const *own, size_t nown, tb__leftovers *removed) {
    name_list old = {0}, temporary = {0};
    TB_TRY(list_names(folder->path, is_checkpoint_file, own, nown, &old));
    TB_TRY(list_names(folder->path, tb__leftovers_is_one, NULL, 0, &temporary));
    if (old.count > 0 && temporary.count > 0)
        return tb__file_fail(TB_REFUSED, folder->path,
                             "it holds %s, and temporary files (%s): a run was killed, maybe while it put its files in "
                             "place; remove all of them, or write into another directory",
                             old.text, temporary.text);
    if (old.count > 0)
        return tb__file_fail(TB_REFUSED, folder->path, "it holds %s; old and new files would be mixed", old.text);
    TB_TRY(tb__leftovers_remove(folder->path, removed));
    return removed->nheld > 0 ? fail_busy(folder->path) : TB_OK;
}
