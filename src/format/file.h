/* Files that are read and written in pieces. Every error message names the file. */
#ifndef TB_FORMAT_FILE_H
#define TB_FORMAT_FILE_H

#include "base/error.h"

#include <dirent.h>

/* tb__file_fail(status, path, format, ...): as tb__fail, with "PATH: " before the message; long paths are shortened at
 * the front. */
#define tb__file_fail(status, path, ...) (tb__set_detail(__VA_ARGS__), tb__file_fail_within(status, path))

/* Puts "PATH: " before the message of tb_error_detail. Its value is `status`. */
tb_status tb__file_fail_within(tb_status status, const char *path);

/* "PATH: WHAT: " and the message of errno. */
tb_status tb__file_fail_errno(tb_status status, const char *path, const char *what);

/* A regular file, for reading. TB_INVALID if there is none at this path, TB_IO if it can't be opened. */
tb_status tb__file_open(const char *path, int *fd, int64_t *nbytes);

/* Complete reads and writes: interrupted or short ones are continued. Any thread may call these. */
tb_status tb__file_read(int fd, const char *path, int64_t offset, void *buffer, size_t nbytes);
tb_status tb__file_write(int fd, const char *path, int64_t offset, const void *bytes, size_t nbytes);

/* DIR/NAME, to be freed by the caller. */
tb_status tb__file_join(const char *dir, const char *name, char **out);

/* Flushes the directory that holds the name to the disk: a file without its name is lost. */
tb_status tb__file_sync_name(const char *path);

/* A file that is being written. It has a temporary name beside its final name, which it gets at the end, atomically:
 * readers see the old file, or the complete new one. The process holds a lock (flock) on the temporary file as long as
 * that exists. A killed process leaves the file behind, without the lock; its name is that of the final file between a
 * dot and ".PID.N.tmp". */
typedef struct tb__draft {
    char *path;
    char *temporary; /* NULL once it is gone */
    int fd;
} tb__draft;

/* Reserves nbytes on the disk, if the file system supports that, so that a lack of space is found here. Failures are
 * TB_IO, and leave nothing behind. */
tb_status tb__draft_init(tb__draft *draft, const char *path, int64_t nbytes);

/* The last step that is likely to fail: writes everything to the system, or with `sync` to the disk. */
tb_status tb__draft_flush(tb__draft *draft, bool sync);

/* Renames the flushed file to its final name. A second call does nothing. */
tb_status tb__draft_commit(tb__draft *draft);

/* Removes a file that was not committed. Zero-initialised with fd -1 is fine, too. */
void tb__draft_fini(tb__draft *draft);

typedef struct tb__leftovers {
    size_t count;   /* files that were removed */
    int64_t nbytes; /* their size on the disk */
    size_t nstuck;  /* files that can't be removed */
    size_t nheld;   /* files that a process still writes, and that stay */
} tb__leftovers;

/* Whether the name is that of a temporary safetensors file or index; for scandir. */
int tb__leftovers_is_one(const struct dirent *entry);

/* Removes the temporary safetensors files and indices that killed processes left in the directory. Those that a process
 * still writes stay; so do all where the file system has no locks. A missing directory has none. */
tb_status tb__leftovers_remove(const char *dir, tb__leftovers *out);

#endif
