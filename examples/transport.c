/* A transport that a program brings itself: ranks that are threads of one process hand messages to each other under a
 * lock. It has only what a transport must have, so that it fits on a few pages; a test runs it through the suite that
 * every transport of the library passes. Here two threads, each with a world of its own, move a matrix over it. */
#include <tensorbus/transport.h>

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

/* A message that has arrived before its receive, an operation, or the news that a peer was lost. */
typedef struct item {
    struct item *next;
    int32_t peer;
    uint64_t tag;
    tb_op *op;
    size_t nbytes;
    char data[];
} item;

typedef struct list {
    item *first, **end;
} list;

typedef struct endpoint {
    struct endpoint *next_open;
    uint64_t id; /* the address */
    tb_transport_env env;
    int event;           /* readable while something is done, or a peer is lost */
    list inbox;          /* messages without a receive */
    list receives;       /* receives without a message */
    list done, lost;     /* for progress */
    uint64_t peers[256]; /* by rank: the id of its endpoint; 0: not connected; LOST */
} endpoint;

#define LOST     UINT64_MAX
#define WHY_LOST "its endpoint was closed"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of all endpoints */
static endpoint *open_endpoints;
static uint64_t last_id;

static void list_init(list *l) {
    l->first = NULL;
    l->end = &l->first;
}

static void list_add(list *l, item *i) {
    i->next = NULL;
    *l->end = i;
    l->end = &i->next;
}

static item *list_take(list *l, item **at) {
    item *i = *at;
    *at = i->next;
    if (l->end == &i->next)
        l->end = at;
    return i;
}

/* The first item of this peer with this tag; NULL: there is none. */
static item *list_match(list *l, int32_t peer, uint64_t tag) {
    for (item **at = &l->first; *at; at = &(*at)->next) {
        if ((*at)->peer == peer && (*at)->tag == tag)
            return list_take(l, at);
    }
    return NULL;
}

static item *make_item(int32_t peer, uint64_t tag, tb_op *op, size_t nbytes) {
    item *i = calloc(1, sizeof *i + nbytes);
    if (i) {
        i->peer = peer;
        i->tag = tag;
        i->op = op;
        i->nbytes = nbytes;
    }
    return i;
}

static endpoint *find(uint64_t id) {
    endpoint *e = open_endpoints;
    while (e && e->id != id)
        e = e->next_open;
    return e;
}

static void wake(endpoint *e) {
    (void)eventfd_write(e->event, 1);
}

static void finish(endpoint *e, item *i, tb_status status) {
    i->op->status = status;
    list_add(&e->done, i);
    wake(e);
}

static size_t size_of(const tb_op *op) {
    size_t nbytes = 0;
    for (size_t i = 0; i < op->npieces; i++)
        nbytes += op->pieces[i].nbytes;
    return nbytes;
}

/* Copies between the pieces of an operation and a buffer, from byte `offset` of the pieces on. */
static void copy_pieces(const tb_op *op, size_t offset, char *buffer, size_t nbytes, bool to_pieces) {
    for (size_t i = 0; i < op->npieces && nbytes > 0; i++) {
        const tb_piece *p = &op->pieces[i];
        if (offset >= p->nbytes) {
            offset -= p->nbytes;
            continue;
        }
        size_t n = p->nbytes - offset < nbytes ? p->nbytes - offset : nbytes;
        if (to_pieces)
            memcpy((char *)p->base + offset, buffer, n);
        else
            memcpy(buffer, (const char *)p->base + offset, n);
        buffer += n;
        nbytes -= n;
        offset = 0;
    }
}

/* A receive that has found its message, of so many bytes. False: there is no room for it, and the receive has ended. */
static bool has_room(endpoint *e, item *r, size_t nbytes) {
    size_t room = size_of(r->op);
    r->op->nbytes = nbytes;
    if (nbytes <= room)
        return true;
    snprintf(r->op->why, sizeof r->op->why, "the message has %zu bytes, there is room for %zu", nbytes, room);
    finish(e, r, TB_TOO_BIG);
    return false;
}

/* The peer has gone; progress ends what waits for it, when all that it has said was heard. */
static void note_gone(endpoint *e, int32_t peer) {
    item *news = make_item(peer, 0, NULL, 0);
    if (news)
        list_add(&e->lost, news);
    wake(e);
}

/* From now on the peer is lost. Whether receives waited for it, which are done now. */
static bool end_receives(endpoint *e, int32_t peer) {
    bool found = false;
    e->peers[peer] = LOST;
    for (item **at = &e->receives.first; *at;) {
        if ((*at)->peer != peer) {
            at = &(*at)->next;
            continue;
        }
        snprintf((*at)->op->why, sizeof(*at)->op->why, WHY_LOST);
        finish(e, list_take(&e->receives, at), TB_LOST);
        found = true;
    }
    return found;
}

/* The end of an operation; without the lock, because `done` may post and cancel. */
static void tell(item *i) {
    tb_op *op = i->op;
    free(i);
    op->state = NULL;
    op->done(op);
}

static tb_status threads_open(const tb_transport_env *env, void **context) {
    endpoint *e = calloc(1, sizeof *e);
    if (!e)
        return tb_error_set(TB_NO_MEMORY, "no memory for an endpoint");
    e->env = *env;
    e->event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    list_init(&e->inbox);
    list_init(&e->receives);
    list_init(&e->done);
    list_init(&e->lost);
    pthread_mutex_lock(&lock);
    e->id = ++last_id;
    e->next_open = open_endpoints;
    open_endpoints = e;
    pthread_mutex_unlock(&lock);
    *context = e;
    return TB_OK;
}

static void end_items(list *l) {
    while (l->first) {
        item *i = list_take(l, &l->first);
        if (i->op) {
            i->op->status = TB_CANCELLED;
            tell(i);
        } else {
            free(i);
        }
    }
}

static void threads_close(void *context) {
    endpoint *e = context, **at = &open_endpoints;
    pthread_mutex_lock(&lock);
    while (*at != e)
        at = &(*at)->next_open;
    *at = e->next_open;
    for (endpoint *other = open_endpoints; other; other = other->next_open) {
        for (int32_t rank = 0; rank < 256; rank++) {
            if (other->peers[rank] == e->id)
                note_gone(other, rank);
        }
    }
    pthread_mutex_unlock(&lock);
    end_items(&e->receives);
    end_items(&e->done);
    end_items(&e->inbox);
    end_items(&e->lost);
    close(e->event);
    free(e);
}

static tb_status threads_address(void *context, void *buffer, size_t *nbytes) {
    endpoint *e = context;
    uint64_t address[2] = {(uint64_t)getpid(), e->id};
    if (*nbytes < sizeof address)
        return tb_error_set(TB_TOO_BIG, "the address has no room");
    memcpy(buffer, address, sizeof address);
    *nbytes = sizeof address;
    return TB_OK;
}

static bool threads_reaches(void *context, const void *address, size_t nbytes) {
    uint64_t pid;
    (void)context;
    memcpy(&pid, address, nbytes == 2 * sizeof pid ? sizeof pid : 0);
    return nbytes == 2 * sizeof pid && pid == (uint64_t)getpid();
}

static tb_status threads_connect(void *context, int32_t peer, const void *address, size_t nbytes) {
    endpoint *e = context;
    uint64_t read[2];
    if (peer < 0 || peer >= 256 || nbytes != sizeof read)
        return tb_error_set(TB_INVALID, "it has no address of this transport");
    memcpy(read, address, sizeof read);
    pthread_mutex_lock(&lock);
    e->peers[peer] = read[1];
    if (!find(read[1]))
        note_gone(e, peer);
    pthread_mutex_unlock(&lock);
    return TB_OK;
}

/* With the lock held. Long messages, and others that are expected, go from memory to memory: their receive is posted.
 */
static tb_status send_message(endpoint *e, tb_op *op, item *own) {
    endpoint *to = find(e->peers[op->peer]);
    size_t nbytes = size_of(op);
    if (e->peers[op->peer] == LOST)
        return tb_error_set(TB_LOST, WHY_LOST);
    if (!to) { /* it has gone, and this end does not know yet */
        finish(e, own, TB_OK);
        return TB_OK;
    }
    item *r = list_match(&to->receives, e->env.rank, op->tag);
    if (!r && !op->is_expected) {
        item *message = make_item(e->env.rank, op->tag, NULL, nbytes);
        if (!message)
            return tb_error_set(TB_NO_MEMORY, "no memory for a message");
        copy_pieces(op, 0, message->data, nbytes, false);
        list_add(&to->inbox, message);
    } else if (r && has_room(to, r, nbytes)) {
        size_t offset = 0;
        for (size_t i = 0; i < op->npieces; offset += op->pieces[i++].nbytes)
            copy_pieces(r->op, offset, op->pieces[i].base, op->pieces[i].nbytes, true);
        finish(to, r, TB_OK);
    } /* else its receive was cancelled, or has too little room: the message is dropped */
    finish(e, own, TB_OK);
    return TB_OK;
}

static tb_status threads_post(void *context, tb_op *op) {
    endpoint *e = context;
    tb_status status = TB_OK;
    item *own = make_item(op->peer, op->tag, op, 0);
    if (!own)
        return tb_error_set(TB_NO_MEMORY, "no memory for an operation");
    op->state = own;
    pthread_mutex_lock(&lock);
    if (op->peer < 0 || op->peer >= 256 || !e->peers[op->peer]) {
        status = tb_error_set(TB_LOST, "it is not connected");
    } else if (op->kind == TB_OP_SEND) {
        status = send_message(e, op, own);
    } else { /* what a peer has said is heard, also after it was lost */
        item *message = list_match(&e->inbox, op->peer, op->tag);
        if (!message && e->peers[op->peer] == LOST) {
            status = tb_error_set(TB_LOST, WHY_LOST);
        } else if (!message) {
            list_add(&e->receives, own);
        } else if (has_room(e, own, message->nbytes)) {
            copy_pieces(op, 0, message->data, message->nbytes, true);
            finish(e, own, TB_OK);
        }
        free(message);
    }
    pthread_mutex_unlock(&lock);
    if (status != TB_OK) {
        op->state = NULL;
        free(own);
    }
    return status;
}

static void threads_cancel(void *context, tb_op *op) {
    endpoint *e = context;
    list *const lists[] = {&e->receives, &e->done}; /* what is in the second has its status */
    pthread_mutex_lock(&lock);
    for (int i = 0; i < 2; i++) {
        item **at = &lists[i]->first;
        while (*at && *at != op->state)
            at = &(*at)->next;
        if (*at) {
            list_take(lists[i], at);
            op->status = i == 0 ? TB_CANCELLED : op->status;
        }
    }
    pthread_mutex_unlock(&lock);
    tell(op->state);
}

static tb_status threads_progress(void *context) {
    endpoint *e = context;
    eventfd_t count;
    (void)eventfd_read(e->event, &count);
    for (;;) {
        pthread_mutex_lock(&lock);
        item *i = e->done.first ? list_take(&e->done, &e->done.first) : NULL;
        item *news = i ? NULL : e->lost.first;
        bool waits = news && end_receives(e, news->peer); /* they are told first */
        if (news && !waits)
            list_take(&e->lost, &e->lost.first);
        pthread_mutex_unlock(&lock);
        if (i) {
            tell(i);
        } else if (news && !waits) {
            e->env.lost(e->env.arg, news->peer, WHY_LOST);
            free(news);
        } else if (!news) {
            return TB_OK;
        }
    }
}

static int threads_fd(void *context) {
    return ((endpoint *)context)->event;
}

static const tb_transport_ops threads = {
    .size = sizeof threads,
    .name = "threads",
    .memory = 1U << TB_MEM_HOST,
    .is_local = true,
    .open = threads_open,
    .close = threads_close,
    .address = threads_address,
    .reaches = threads_reaches,
    .connect = threads_connect,
    .post = threads_post,
    .cancel = threads_cancel,
    .progress = threads_progress,
    .fd = threads_fd,
};

/* ---- Two ranks ------------------------------------------------------------------------------------------------- */

enum { ROWS = 300, COLUMNS = 200 };

static char url[64];

static void *run_rank(void *arg) {
    const char *group = arg;
    bool sends = strcmp(group, "trainer") == 0, ok;
    static float memory[2][ROWS * COLUMNS];
    float *matrix = memory[sends];
    tb_world *world = NULL;
    tb_pair *pair = NULL;
    tb_batch *batch = NULL;
    tb_transfer *transfer = NULL;
    tb_world_opts opts = {.size = sizeof opts, .transport = "threads"};
    tb_tensor w = {.size = sizeof w, .data = matrix, .dtype = TB_F32, .ndim = 2, .shape = {ROWS, COLUMNS}};
    for (int i = 0; sends && i < ROWS * COLUMNS; i++)
        matrix[i] = (float)i;
    ok = tb_world_join(url, group, 0, 1, &opts, &world) == TB_OK &&
         tb_pair_create(world, "weights", sends ? "engine" : "trainer", "mesh=1 place=R", NULL, &pair) == TB_OK &&
         tb_batch_create(world, "step", NULL, &batch) == TB_OK && tb_batch_add(batch, pair, "w", &w) == TB_OK &&
         (sends ? tb_send : tb_recv)(batch, NULL, &transfer) == TB_OK && tb_wait(transfer, TB_COMMITTED, -1) == TB_OK;
    if (!ok)
        fprintf(stderr, "%s: %s\n", group, tb_error_detail());
    for (int i = 0; ok && i < ROWS * COLUMNS; i++)
        ok = matrix[i] == (float)i;
    tb_transfer_destroy(transfer);
    tb_batch_destroy(batch);
    tb_pair_destroy(pair);
    tb_world_destroy(world);
    return ok ? arg : NULL;
}

int main(void) {
    static char trainer[] = "trainer", engine[] = "engine";
    char folder[] = "/tmp/transport-XXXXXX";
    pthread_t thread;
    void *others;
    if (tb_transport_register(&threads) != TB_OK || !mkdtemp(folder)) {
        fprintf(stderr, "%s\n", tb_error_detail());
        return EXIT_FAILURE;
    }
    snprintf(url, sizeof url, "unix:%s/store", folder);
    pthread_create(&thread, NULL, run_rank, trainer);
    bool ok = run_rank(engine);
    pthread_join(thread, &others);
    rmdir(folder);
    puts(ok && others ? "the matrix has arrived" : "failed");
    return ok && others ? EXIT_SUCCESS : EXIT_FAILURE;
}
