/* A client's process and its memory: files that it has sent, and other addresses, which only process_vm_readv and
 * process_vm_writev reach. Files that can't shrink, such as memory of tb_alloc, are mapped. Others are read and written
 * by pread and pwrite, because a mapping would end this process if they shrank. */
#ifndef TB_BUS_AGENT_CLIENT_PROCESS_H
#define TB_BUS_AGENT_CLIENT_PROCESS_H

#include "base/error.h"

#include <sys/types.h>

enum { TB__CLIENT_PROCESS_PIECES = 512 }; /* pieces that one process_vm_writev writes */

/* A file that the client has sent. Opened once, however often it is sent. */
typedef struct tb__client_file {
    dev_t device;
    ino_t inode;
    void *base;    /* NULL: it is not mapped, but read and written ... */
    int fd;        /* ... by this; -1: it is mapped */
    int flags;     /* of the descriptor */
    size_t nbytes; /* of a mapped file */
    size_t refs;
    struct tb__client_file *next;
} tb__client_file;

typedef struct tb__client_process {
    pid_t pid;
    int pidfd;           /* -1: the kernel has no pidfds */
    uint64_t start_time; /* in ticks since the system started: a pid may be used again */
    tb__client_file *files;
} tb__client_process;

/* Identifies the process by the socket's credentials. TB_DENIED if it is another user's. */
tb_status tb__client_process_init(tb__client_process *process, int socket);
void tb__client_process_fini(tb__client_process *process); /* unmaps all files */

/* Maps a file, or keeps its descriptor. It has to be a file of this process's user. Each call needs an unmap. */
tb_status tb__client_process_map_file(tb__client_process *process, int fd, tb__client_file **out);
void tb__client_process_unmap_file(tb__client_process *process, tb__client_file *file);

tb_status tb__client_file_size(const tb__client_file *file, size_t *out); /* the current size */

/* Address ranges that the process may read, in order, with gaps between them. */
typedef struct tb__client_maps {
    pid_t pid;
    struct tb__client_range {
        uint64_t first, last;
    } * item;
    size_t count, capacity;
} tb__client_maps;

tb_status tb__client_process_read_maps(const tb__client_process *process, tb__client_maps *out); /* free its items */
/* TB_INVALID unless the process may read all of these bytes. */
tb_status tb__client_maps_check(const tb__client_maps *maps, uint64_t address, size_t nbytes);

/* Bytes of a file that is not mapped, or, if that is NULL, at an address of the process. TB_IO if the file is too short
 * by now. */
tb_status tb__client_read(const tb__client_process *process, const tb__client_file *file, uint64_t at, void *to,
                          size_t nbytes);
/* Pieces of `nbytes` each, at the same offsets from `from` and from the place there. */
tb_status tb__client_write(const tb__client_process *process, const tb__client_file *file, uint64_t at,
                           const void *from, const size_t *offsets, size_t n, size_t nbytes);

#endif
