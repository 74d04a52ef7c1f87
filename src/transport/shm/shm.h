/* The shm transport: processes on one machine.
 *
 * Each rank connects to each peer that it sends to, with a Unix socket; messages go one way on it, replies come back.
 * So a pair of ranks has two sockets. Short messages are sent through the socket. For a long one the sender sends its
 * addresses, and the receiver reads it straight from the sender's memory into the posted receive (process_vm_readv); if
 * the system forbids that, the bytes go through a ring in shared memory. Memory of a memfd is mapped by peers, file by
 * file.
 *
 * Each rank shares one *control page* with its peers: a word per long message and per registration. A sender revokes a
 * long message, and a receiver completes it, by compare-and-set of its word, so that a late reader discards what it
 * read; a registration's word is cleared when it is unregistered. */
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
    SHM_VERSION = 7,
    SHM_MAX_FRAME = 32 << 10,
    SHM_MAX_PIECES = 512,     /* of a long message; one with more goes through the ring */
    SHM_MAX_IOV = 1024,       /* limit of process_vm_readv */
    SHM_LONG_MESSAGES = 4096, /* at a time */
    SHM_REGISTRATIONS =
        1 << 20,              /* at a time: a tensor is one, and what is not used of the control page costs nothing */
    SHM_READ_SLICE = 4 << 20, /* bytes read from a peer at a time */
    SHM_RING_SLOTS = 8,
    SHM_RING_SLOT_SIZE = 256 << 10,
    SHM_HELLO_FDS = 3, /* descriptors that a hello takes, beside the socket */
    SHM_MAX_FDS = 250, /* descriptors of a frame; the kernel's limit is 253 */
};

/* Instead of a frame's descriptor: this process had none left for it. */
enum { SHM_FD_LOST = -2 };

/* The descriptors of a frame. */
typedef struct shm_fds {
    int item[SHM_MAX_FDS];
    size_t count;
    bool is_short; /* this process had too few left for them: there are none */
} shm_fds;

/* Descriptors that a peer has sent and nobody has taken yet. */
typedef struct shm_sent_fds {
    uint64_t id;
    TB_VEC(int) fds;
    bool is_short; /* some are missing */
} shm_sent_fds;

/* The control page, which a rank shares with its peers. */
typedef struct shm_control {
    _Atomic uint64_t message[SHM_LONG_MESSAGES]; /* serial << 2 | state */
    _Atomic uint64_t memory[SHM_REGISTRATIONS];  /* epoch of the valid registration; 0: none */
    uint64_t probe;                              /* random; read by peers to test process_vm_readv */
} shm_control;

enum { MESSAGE_READY = 1, MESSAGE_COMPLETE = 2, MESSAGE_REVOKED = 3 };

typedef enum shm_kind {
    SHM_HELLO,   /* first on a new socket; serial: number of the connection, 0 means 1; carries the control page's
                    descriptor */
    SHM_WELCOME, /* the reply; serial: whether the sender's memory can be read */
    SHM_MESSAGE, /* tag, then the bytes */
    SHM_LONG,    /* tag, nbytes, slot of the control page, serial; then pieces to read, or none: through the ring */
    SHM_REVOKE,  /* serial: the long message is withdrawn */
    SHM_CHUNK,   /* serial of the message, slot of the ring, nbytes */
    SHM_CREDIT,  /* back: the slot of the ring is free again */
    SHM_DONE,    /* back: serial: the long message is received, or has no receive any more; tag: a status, negated */
    SHM_FILE,    /* serial: a file with registered memory in it; carries its descriptor */
    SHM_FORGET,  /* serial: a file without registered memory any more */
    SHM_RING,    /* carries the ring's descriptor */
    SHM_RESEND,  /* back: serial: the file's descriptor was lost for lack of descriptors; the next export sends it again
                  */
    SHM_FDS, /* serial: an id, under which the frame's descriptors can be taken, after those of earlier frames; slot:
                1 if they are withdrawn instead */
    SHM_SHORTAGE, /* back: the connection is closed for lack of descriptors; nbytes: the limit */
} shm_kind;

typedef struct shm_frame {
    uint16_t kind, is_expected; /* is_expected: of short messages, as in tb_op */
    uint32_t slot;
    uint64_t serial, tag, nbytes;
} shm_frame;

typedef struct shm_hello {
    uint32_t magic, version;
    int32_t rank;
    uint32_t unused;
    uint64_t start_time; /* of the process, to detect a reused pid */
    uint64_t probe_address, probe;
} shm_hello;

typedef struct shm shm;
typedef struct shm_peer shm_peer;

typedef enum shm_watch_kind { WATCH_LISTEN, WATCH_WAKE, WATCH_RETRY, WATCH_LINK, WATCH_PROCESS } shm_watch_kind;

/* One socket to or from a peer. */
typedef struct shm_link {
    shm_watch_kind watch; /* first: epoll's data points to it */
    int fd;               /* -1: none */
    shm_peer *peer;       /* NULL: accepted, before its hello */
    bool is_out, is_ready, wants_write;
    struct shm_queued {
        shm_frame frame;
        int *fds; /* to send with it, owned */
        size_t nfds;
    } * queue; /* small frames that wait for room in the socket */
    size_t queue_count, queue_capacity;
    int reserved[SHM_HELLO_FDS]; /* before the hello: keeps descriptors free for it */
} shm_link;

typedef enum shm_state {
    SHM_QUEUED,    /* a send that waits for room in the socket, or in the control page */
    SHM_SENDING,   /* a long message, announced to the peer */
    SHM_WAITING,   /* a receive without a message yet */
    SHM_RECEIVING, /* of a long message */
    SHM_FINISHED
} shm_state;

/* A posted operation. */
typedef struct shm_posted {
    tb__waiter waiter; /* in one of the lists, or a receive by its tag */
    tb_op *op;
    shm_peer *peer;
    shm_state state;
    size_t nbytes, at; /* at: progress */

    /* Of a long message. */
    uint32_t slot; /* of the sender's control page */
    uint64_t serial;
    bool by_ring;
    tb_range *ranges; /* at the receiver: addresses in the sender's memory */
    size_t nranges;
} shm_posted;

/* A file of ours with registered memory in it. */
typedef struct shm_file {
    uint64_t id; /* never reused */
    size_t slot; /* in the list of files */
    dev_t dev;
    ino_t ino;
    size_t nbytes;
    int fd;
    size_t refs; /* registrations */
    bool may_stay_mapped;
    uint64_t idle_since; /* without registrations, in the order of that; 0: it has some */
} shm_file;

/* A mapping of a peer's whole file. */
typedef struct shm_mapping {
    uint64_t file;
    void *base; /* NULL: it could not be mapped: ... */
    int error;
    size_t nbytes;
    size_t refs; /* remotes */
    bool is_forgotten;
} shm_mapping;

/* A connection with a peer. A connection after a loss is a new shm_peer with the next number. */
struct shm_peer {
    shm_watch_kind watch; /* first, as in shm_link; of pidfd */
    shm *owner;
    int32_t rank;
    uint64_t number; /* of the connection, from 1 */
    _Atomic bool is_lost;
    bool is_ending; /* the next progress loses it */
    char why[96];   /* reason, if it is lost or ending */
    shm_link out, *in;
    pid_t pid;
    int pidfd;
    bool can_read;         /* we can read its memory */
    bool it_can_read;      /* it can read ours */
    shm_control *control;  /* its control page; NULL before its hello */
    tb__waiters queue;     /* sends that are not announced yet */
    tb__waiters sending;   /* long sends that are announced */
    tb__waiters receiving; /* receives of a long message from it */
    size_t nremotes;       /* imported and not released */
    TB_VEC(shm_mapping *) mappings;
    TB_VEC(uint64_t) sent;    /* by slot: id of the file that it was sent */
    TB_VEC(shm_sent_fds) fds; /* from it */
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

/* A registration id. */
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
    shm_watch_kind listen_watch, wake_watch, retry_watch; /* epoll's data */
    int epoll, listener, wake;
    bool is_woken;           /* `wake` is readable */
    bool is_progressing;     /* progress has yet to read slices and to complete what has finished */
    int retry;               /* timer of shm_retry, after a shortage of descriptors */
    bool is_accept_paused;   /* until then */
    int64_t warn_again_ms;   /* when a shortage may be logged again */
    uint64_t start_time;     /* of this process */
    uint64_t user_namespace; /* its inode */
    uint32_t user;           /* of this process */
    char name[32];           /* of the listener, in the abstract namespace */
    shm_control *control;
    int control_fd;
    uint64_t next_serial, next_epoch, next_file, next_fds;
    uint64_t nidled;       /* files that have lost their last registration */
    uint32_t next_message; /* where the search for a free message word starts */
    TB_VEC(shm_registration) memory;
    uint32_t memory_free;            /* the first free number + 1; 0: none */
    TB_VEC(shm_file *) files;        /* NULL: a free place */
    TB_VEC(shm_peer *) peers;        /* the newest connection with each */
    tb__index by_rank;               /* in there */
    TB_VEC(shm_peer *) retired;      /* older connections with remotes */
    TB_VEC(shm_link *) unidentified; /* accepted links before their hello */
    tb__match receives, unexpected;
    tb__waiters finished; /* to be completed in the next progress */
    size_t nreading;      /* receives that read a peer's memory */
};

/* shm_wire.c: frames on sockets. A link that breaks loses its peer. */
tb_status shm_link_watch(shm *s, shm_link *link);
/* Sends now, or queues; takes ownership of the descriptors. */
void shm_link_send(shm *s, shm_link *link, const shm_frame *frame, const int *fds, size_t nfds);
/* The same, but the caller keeps its descriptors: those of a frame that has to wait are duplicated. */
tb_status shm_link_send_copies(shm *s, shm_link *link, const shm_frame *frame, const int *fds, size_t nfds);
/* Sends a frame with data. 0: sent; EAGAIN: no room in the socket; else an errno. */
int shm_link_try(shm_link *link, const shm_frame *frame, const struct iovec *data, size_t ndata, const int *fds,
                 size_t nfds);
void shm_link_flush(shm *s, shm_link *link);
void shm_link_want_write(shm *s, shm_link *link, bool wants);
void shm_link_close(shm *s, shm_link *link);
/* Receives a frame; returns the size of its data, 0 with *is_empty if there is none, -1 if the link is broken. The
 * caller closes *fds. */
ssize_t shm_link_receive(shm_link *link, shm_frame *frame, void *data, size_t room, shm_fds *fds, bool *is_empty);
void shm_fds_close(shm_fds *fds);
/* The descriptor of a frame that has one; -1: it has none, or several; or SHM_FD_LOST. */
static inline int shm_fds_only(const shm_fds *fds) {
    return fds->is_short ? SHM_FD_LOST : fds->count == 1 ? fds->item[0] : -1;
}

/* shm_fds.c: descriptors for layers above. */
tb_status shm_send_fds(void *context, int32_t peer, const int *fds, size_t nfds, uint64_t *id);
tb_status shm_take_fds(void *context, int32_t peer, uint64_t id, int *fds, size_t nfds);
bool shm_on_fds(shm_peer *peer, const shm_frame *frame, shm_fds *fds); /* takes the descriptors */
void shm_sent_fds_close(shm_peer *peer);

/* shm_message.c: sends and receives. */
tb_status shm_post_message(shm *s, shm_peer *peer, tb_op *op);
void shm_cancel_message(shm *s, shm_posted *p);
void shm_send_queued(shm *s, shm_peer *peer); /* as far as the socket has room */
void shm_fill_ring(shm *s, shm_peer *peer);   /* with the next bytes of long sends */
bool shm_read_slices(shm *s);                 /* true: there is more */
/* Handles a frame of a peer. False: it is not valid, or the peer was lost. */
bool shm_on_frame(shm *s, shm_link *link, const shm_frame *frame, const unsigned char *data, size_t nbytes,
                  shm_fds *fds);
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
/* Reads nbytes of a peer's memory through the kernel: from ranges relative to address `base`, to pieces, starting
 * `skip` bytes into both lists. */
tb_status shm_process_read(const shm_peer *peer, const tb_piece *pieces, size_t npieces, uint64_t base,
                           const tb_range *ranges, size_t nranges, size_t skip, size_t nbytes);

/* shm_file.c: files of registered memory, ours and peers'. */
/* A reference to the file of a new registration; shm_file_drop releases it. */
tb_status shm_file_take(shm *s, const tb_mem_desc *desc, shm_file **out);
void shm_file_drop(shm *s, shm_file *file);
/* Sends its descriptor, unless the peer has it. */
tb_status shm_file_send(shm *s, const shm_file *file, shm_peer *peer);
void shm_files_close(shm *s);
/* Maps a peer's ring; NULL, with tb_error_detail, if it can't be used. */
unsigned char *shm_map_ring(int fd);
bool shm_on_file(shm_peer *peer, const shm_frame *frame, int fd);
void shm_on_forget(shm_peer *peer, const shm_frame *frame);
void shm_on_resend(shm *s, shm_peer *peer, const shm_frame *frame);
/* The mapping of a file that the peer has sent, or NULL. Callers that keep it increment refs. */
shm_mapping *shm_mapping_find(const shm_peer *peer, uint64_t file);
void shm_mapping_release(shm_peer *peer, shm_mapping *mapping);
void shm_mappings_forget(shm_peer *peer); /* the peer is lost */
void shm_mappings_close(shm_peer *peer);

/* shm_shortage.c: shortage of descriptors. */

/* `what`, such as "accept a connection", failed for lack of descriptors: records and logs it, and sets the timer of
 * shm_retry. */
void shm_retry_later(shm *s, const char *what, int error);
/* Sends SHM_SHORTAGE. */
void shm_tell_shortage(shm *s, shm_link *link);
/* Loses the peer because this process has no descriptor for its frame, and tells it the reason. */
void shm_lose_by_shortage(shm *s, shm_peer *peer);
/* Accepts connections, and reserves descriptors for their hello. */
void shm_accept(shm *s);
void shm_release_reserved(shm_link *link);
/* Tries again what has failed for lack of descriptors. */
void shm_retry(shm *s);

/* shm.c */
shm_peer *shm_find(const shm *s, int32_t rank);
void shm_lose(shm *s, shm_peer *peer, const char *why);
void shm_free_retired(shm *s, shm_peer *peer); /* if it is retired; its last remote was released */
void shm_free_link(shm *s, shm_link *link);
void shm_finish(shm *s, shm_posted *p, tb_status status); /* completed in the next progress */
void shm_wake(shm *s); /* there is something to read or to complete: progress has to be called, unless it is running */
void *shm_map_fd(int fd, size_t nbytes);

#endif
