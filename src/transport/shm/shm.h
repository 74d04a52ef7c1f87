/* The shm transport: processes of one machine.
 *
 * Each rank connects to each peer it sends to, over a Unix socket of its own; messages go one way on it, answers come
 * back. So a pair of ranks has two sockets, and nobody has to agree on who calls whom. Short messages travel inside the
 * socket. Of a long one the sender says where it is, and the receiver reads it straight from the sender's memory into
 * the receive that is posted (process_vm_readv); where the system forbids that, the bytes go through a ring of shared
 * memory. Memory behind a memfd is mapped by peers, file by file.
 *
 * Each rank shares one *control page* with its peers: a word per long message and per registration. A sender revokes a
 * long message, and a receiver completes it, by compare-and-set of its word, so a reader that comes too late never
 * believes what it read; a registration's word changes when it is withdrawn. */
#ifndef TB_TRANSPORT_SHM_SHM_H
#define TB_TRANSPORT_SHM_SHM_H

#include "base/index.h"
#include "base/process.h"
#include "transport/message.h"

#include <stdatomic.h>
#include <sys/types.h>
#include <sys/uio.h>

enum {
    SHM_MAGIC = 0x54425348,
    SHM_VERSION = 5,
    SHM_MAX_FRAME = 32 << 10,
    SHM_MAX_PIECES = 512,      /* of a long message that is read; one with more goes through the ring */
    SHM_MAX_IOV = 1024,        /* pieces that the kernel takes in one call */
    SHM_LONG_MESSAGES = 4096,  /* under way at a time */
    SHM_REGISTRATIONS = 65536, /* at a time */
    SHM_READ_SLICE = 4 << 20,  /* bytes read from a peer before others get their turn */
    SHM_RING_SLOTS = 8,
    SHM_RING_SLOT_SIZE = 256 << 10,
    SHM_MEETING_FDS = 3, /* descriptors that meeting a peer takes, beside its socket */
};

/* In place of a descriptor that came with a frame: this process had none left for it. */
enum { SHM_FD_LOST = -2 };

/* What a rank shares with its peers. */
typedef struct shm_control {
    _Atomic uint64_t message[SHM_LONG_MESSAGES]; /* serial << 2 | state */
    _Atomic uint64_t memory[SHM_REGISTRATIONS];  /* epoch of the registration that is valid; 0: none */
    uint64_t probe;                              /* what a peer that can read our memory reads at its address */
} shm_control;

enum { MESSAGE_READY = 1, MESSAGE_COMPLETE = 2, MESSAGE_REVOKED = 3 };

typedef enum shm_kind {
    SHM_HELLO,    /* first on a new socket; serial: the number of the connection, 0 is 1; carries the control page's
                     descriptor */
    SHM_WELCOME,  /* the answer; `serial`: whether the sender's memory can be read */
    SHM_MESSAGE,  /* tag, then the bytes */
    SHM_LONG,     /* tag, nbytes, slot of the control page, serial; then pieces to read, or none: through the ring */
    SHM_REVOKE,   /* serial: the long message is withdrawn */
    SHM_CHUNK,    /* serial of the message, slot of the ring, nbytes */
    SHM_CREDIT,   /* back: the slot of the ring is free again */
    SHM_DONE,     /* back: serial: the long message is in, or nobody receives it; tag: a status, negated */
    SHM_FILE,     /* serial: a file with registered memory in it; carries its descriptor */
    SHM_FORGET,   /* serial: a file with none left */
    SHM_RING,     /* carries the ring's descriptor */
    SHM_AGAIN,    /* back: serial: the file's descriptor could not be taken; the next export is to send it again */
    SHM_SHORTAGE, /* back: nbytes: the connection is given up, because the limit of descriptors, which is this, is
                     reached */
} shm_kind;

typedef struct shm_frame {
    uint16_t kind, is_expected; /* the latter of short messages, as in tb_op */
    uint32_t slot;
    uint64_t serial, tag, nbytes;
} shm_frame;

typedef struct shm_hello {
    uint32_t magic, version;
    int32_t rank;
    uint32_t unused;
    uint64_t start_time; /* of the process, so that its number can't be mistaken for a later one's */
    uint64_t probe_address, probe;
} shm_hello;

typedef struct shm shm;
typedef struct shm_peer shm_peer;

typedef enum shm_watch_kind { WATCH_LISTEN, WATCH_WAKE, WATCH_RETRY, WATCH_LINK, WATCH_PROCESS } shm_watch_kind;

/* One socket to or from a peer. */
typedef struct shm_link {
    shm_watch_kind watch; /* first: what the event loop finds */
    int fd;               /* -1: none */
    shm_peer *peer;       /* NULL: accepted, has not said who it is */
    bool is_out, is_ready, wants_write;
    struct shm_queued {
        shm_frame frame;
        int fd; /* to go with it, ours to close; -1: none */
    } * queue;  /* answers and other small frames that wait for room */
    size_t queue_count, queue_capacity;
    int reserved[SHM_MEETING_FDS]; /* of one that has not said who it is: descriptors that make room for what follows */
} shm_link;

typedef enum shm_state {
    SHM_QUEUED,    /* a send that waits for room in the socket, or in the control page */
    SHM_SENDING,   /* a long one, of which the peer knows */
    SHM_WAITING,   /* a receive of which nothing has come */
    SHM_RECEIVING, /* of a long message */
    SHM_FINISHED
} shm_state;

/* A posted operation. */
typedef struct shm_posted {
    tb__waiter waiter; /* in one of the lists, or a receive by its tag */
    tb_op *op;
    shm_peer *peer;
    shm_state state;
    size_t nbytes, at; /* in all, and how far it has come */

    /* Of a long message. */
    uint32_t slot; /* of the sender's control page */
    uint64_t serial;
    bool by_ring;
    tb_range *ranges; /* at the receiver: in the sender's memory, from address 0 */
    size_t nranges;
} shm_posted;

/* A file of ours with registered memory in it. */
typedef struct shm_file {
    uint64_t id; /* never used again */
    size_t slot; /* in the list of files */
    dev_t dev;
    ino_t ino;
    size_t nbytes;
    int fd;
    size_t refs; /* registrations */
} shm_file;

/* A file of a peer's, all of it. */
typedef struct shm_mapping {
    uint64_t file;
    void *base; /* NULL: it could not be mapped, for this reason */
    int error;
    size_t nbytes;
    size_t refs; /* remotes */
    bool is_forgotten;
} shm_mapping;

/* A connection with a peer. After a loss the next one has an object of its own, with the next number. */
struct shm_peer {
    shm_watch_kind watch; /* first, as in shm_link; for the process */
    shm *owner;
    int32_t rank;
    uint64_t number; /* of the connection, from 1 */
    _Atomic bool is_lost;
    bool is_ending; /* it is to be lost in the next progress */
    char why[96];   /* it is lost, or ending */
    shm_link out, *in;
    pid_t pid;
    int pidfd;
    bool can_read;         /* we can read its memory */
    bool it_can_read;      /* it can read ours */
    shm_control *control;  /* its page; NULL until it says hello */
    tb__waiters queue;     /* sends that are not on their way yet */
    tb__waiters sending;   /* long sends that are */
    tb__waiters receiving; /* receives that get a long message of its */
    size_t nremotes;       /* that were imported, and not released yet */
    TB_VEC(shm_mapping *) mappings;
    TB_VEC(uint64_t) sent; /* by slot: the file that it was sent */
    unsigned char *ring_out, *ring_in;
    uint32_t ring_free; /* a bit per slot of ring_out */
};

struct tb_mem {
    void *base;
    size_t nbytes;
    shm_file *file; /* NULL: none */
    size_t offset;
    uint32_t id;
    uint64_t epoch;
};

/* A number of a registration. */
typedef struct shm_registration {
    tb_mem *mem;        /* NULL: free */
    uint32_t next_free; /* as memory_free */
} shm_registration;

struct tb_remote {
    shm_peer *peer;
    shm_mapping *mapping; /* NULL: no file */
    uint32_t id;
    uint64_t epoch;
    uint64_t base; /* in the owner */
    size_t nbytes, offset;
};

struct shm {
    tb_transport_env env;
    shm_watch_kind listen_watch, wake_watch, retry_watch; /* what the event loop finds */
    int epoll, listener, wake;
    int retry;             /* a timer, for what failed for want of descriptors */
    bool is_full;          /* the listener is not watched until then */
    int64_t warn_again_ms; /* when that may be logged again */
    uint64_t start_time;   /* of this process */
    char name[32];         /* of the listener, in the abstract namespace */
    shm_control *control;
    int control_fd;
    uint64_t next_serial, next_epoch, next_file;
    uint32_t next_message; /* where to look for a free word of the control page */
    TB_VEC(shm_registration) memory;
    uint32_t memory_free;         /* the first free number + 1; 0: none */
    TB_VEC(shm_file *) files;     /* NULL: a free place */
    TB_VEC(shm_peer *) peers;     /* the last connection with each */
    tb__index by_rank;            /* in there */
    TB_VEC(shm_peer *) retired;   /* connections before, of which there are remotes */
    TB_VEC(shm_link *) strangers; /* accepted, have not said who they are */
    tb__match receives, arrivals;
    tb__waiters finished; /* to be told in the next progress */
    size_t nreading;      /* receives that read a peer's memory */
};

/* shm_wire.c: frames on sockets. A link that breaks loses its peer. */
tb_status shm_link_watch(shm *s, shm_link *link);
/* Sends now, or queues; takes `fd` over. */
void shm_link_send(shm *s, shm_link *link, const shm_frame *frame, int fd);
/* Sends a frame and data that must go together. 0: sent; EAGAIN: try again when there is room; else an error. */
int shm_link_try(shm_link *link, const shm_frame *frame, const struct iovec *data, size_t ndata, int fd);
void shm_link_flush(shm *s, shm_link *link);
void shm_link_want_write(shm *s, shm_link *link, bool wants);
void shm_link_close(shm *s, shm_link *link);
/* One frame; returns the bytes after it, 0 with *is_empty if there is none, -1 if the link broke. *fd is the descriptor
 * that came with it, -1 if there is none, or SHM_FD_LOST. */
ssize_t shm_link_receive(shm_link *link, shm_frame *frame, void *data, size_t room, int *fd, bool *is_empty);

/* shm_message.c: sends and receives. */
tb_status shm_post_message(shm *s, shm_peer *peer, tb_op *op);
void shm_cancel_message(shm *s, shm_posted *p);
void shm_push(shm *s, shm_peer *peer);      /* sends what the socket has room for */
void shm_fill_ring(shm *s, shm_peer *peer); /* with the next bytes of long sends */
bool shm_read_slices(shm *s);               /* true: there is more to read */
/* A frame of a peer's. False: it is not valid. */
bool shm_on_frame(shm *s, shm_link *link, const shm_frame *frame, const unsigned char *data, size_t nbytes, int fd);
void shm_drop_messages(shm *s, shm_peer *peer, tb_status status);

/* shm_memory.c */
tb_status shm_register(void *context, const tb_mem_desc *desc, tb_mem **out);
void shm_unregister(void *context, tb_mem *mem);
tb_status shm_export(void *context, tb_mem *mem, int32_t peer, tb_mem_key *out);
tb_status shm_import_key(void *context, int32_t peer, const tb_mem_key *key, tb_remote **out);
void shm_release(void *context, tb_remote *remote);
void *shm_map(void *context, tb_remote *remote);
bool shm_is_valid(void *context, const tb_remote *remote);
tb_status shm_read(void *context, tb_remote *remote, const tb_range *ranges, size_t nranges, const tb_piece *pieces,
                   size_t npieces);
void shm_memory_close(shm *s);
/* Reads nbytes of a peer's memory through the kernel: from ranges that count from address `base` to pieces, beginning
 * `skip` bytes into both lists. */
tb_status shm_process_read(const shm_peer *peer, const tb_piece *pieces, size_t npieces, uint64_t base,
                           const tb_range *ranges, size_t nranges, size_t skip, size_t nbytes);

/* shm_file.c: files behind memory, ours and peers'. */
/* The file of a new registration, to be given up with shm_file_drop. */
tb_status shm_file_take(shm *s, const tb_mem_desc *desc, shm_file **out);
void shm_file_drop(shm *s, shm_file *file);
/* Sends its descriptor, unless the peer has it. */
tb_status shm_file_send(shm *s, const shm_file *file, shm_peer *peer);
void shm_files_close(shm *s);
/* A peer's ring; NULL, with a sentence, if it can't be used. */
unsigned char *shm_map_ring(int fd);
bool shm_on_file(shm_peer *peer, const shm_frame *frame, int fd);
void shm_on_forget(shm_peer *peer, const shm_frame *frame);
void shm_on_again(shm *s, shm_peer *peer, const shm_frame *frame);
/* A file that has come from the peer; NULL if it has not. Whoever keeps it adds to its refs. */
shm_mapping *shm_mapping_find(const shm_peer *peer, uint64_t file);
void shm_mapping_release(shm_peer *peer, shm_mapping *mapping);
void shm_mappings_forget(shm_peer *peer); /* its owner is gone */
void shm_mappings_close(shm_peer *peer);

/* shm_shortage.c: what is done without descriptors. */

/* Something, such as "accept a connection", failed for want of descriptors. It is noted and logged, and tried again in
 * a moment. */
void shm_retry_later(shm *s, const char *what, int error);
/* Tells the other end why its connection is closed. */
void shm_tell_shortage(shm *s, shm_link *link);
/* The peer is given up because this process has no descriptor for what it sent; it is told so. */
void shm_give_up(shm *s, shm_peer *peer);
/* Accepts connections, and takes descriptors that make room for what follows their hello. */
void shm_accept(shm *s);
void shm_release_reserved(shm_link *link);
/* What has failed for want of descriptors. */
void shm_retry(shm *s);

/* shm.c */
shm_peer *shm_find(const shm *s, int32_t rank);
void shm_lose(shm *s, shm_peer *peer, const char *why);
void shm_free_retired(shm *s, shm_peer *peer); /* if it is one: the last of its remotes was released */
void shm_free_link(shm *s, shm_link *link);
void shm_finish(shm *s, shm_posted *p, tb_status status); /* told in the next progress */
void *shm_map_fd(int fd, size_t nbytes);

#endif
