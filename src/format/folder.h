/* The directory that a checkpoint is written into. */
#ifndef TB_FORMAT_FOLDER_H
#define TB_FORMAT_FOLDER_H

#include "format/file.h"

typedef struct tb__folder {
    char *path;
    bool is_new; /* it was made here, and is removed unless it is kept */
    int fd;      /* has the lock (flock) on it */
} tb__folder;

/* Makes the directory if it is not there, and locks it until fini. TB_REFUSED if another run has the lock. Some network
 * file systems have such locks between the processes of one host only. */
tb_status tb__folder_take(tb__folder *folder, const char *path);

/* TB_REFUSED if the directory holds an index or a *.safetensors file whose name is not among `own`: old and new files
 * would be mixed. Nothing is removed then. Else removes files that killed runs left; TB_REFUSED if a process that does
 * not have the folder's lock, on another host, still writes such a file. */
tb_status tb__folder_clear(const tb__folder *folder, const char *const *own, size_t nown, tb__leftovers *removed);

/* Keeps the directory; all files have their final names. With `sync`, these names are on the disk, and the directory's
 * own if it is new. */
tb_status tb__folder_keep(tb__folder *folder, bool sync);

/* Accepts a zero-initialised one. */
void tb__folder_fini(tb__folder *folder);

#endif
