/* What the tests of agents share: agents that are threads of the test, and raw connections to them. */
#ifndef TB_BUS_AGENT_AGENT_TEST_H
#define TB_BUS_AGENT_AGENT_TEST_H

#include "bus/agent/agent.h"
#include "bus/bus_test.h"
#include "bus/protocol/protocol.h"

#include "base/mem.h"

#include "../tests/support/program.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

/* An agent for each rank of a scene. The ranks' threads are its clients' programs. */
typedef struct agent_scene {
    scene scene; /* first */
    const char *token;
    int timeout_ms;
    int64_t plan_bytes;
    bool no_gpu;
    const char *const *groups; /* of the ranks, those of one group in a row; NULL: "a" and "b" */
    struct seat {
        tb__agent *agent;
        pthread_t loop;
        char path[80];
    } seats[MAX_RANKS];
} agent_scene;

static inline struct seat *seat_of(const rank *r) {
    agent_scene *h = (agent_scene *)r->scene;
    return &h->seats[r - r->scene->ranks];
}

/* The agent of another seat; b 0 is after the last of a. */
static inline const char *path_of(const rank *r, int position) {
    return ((agent_scene *)r->scene)->seats[position].path;
}

static inline void *seat_main(void *arg) {
    struct seat *s = arg;
    tb__agent_run(s->agent);
    return NULL;
}

static inline void seat_open(agent_scene *h, int position) {
    struct seat *s = &h->seats[position];
    const rank *r = &h->scene.ranks[position];
    char path[sizeof s->path];
    snprintf(path, sizeof path, "%.31s/%.8s%d", h->scene.folder, r->group, (int)r->index);
    memcpy(s->path, path, sizeof path);
    tb__agent_opts opts = {.socket = s->path,
                           .store = h->scene.url,
                           .group = r->group,
                           .index = r->index,
                           .size = r->size,
                           .token = h->token,
                           .timeout_ms = h->timeout_ms ? h->timeout_ms : PATIENCE_MS,
                           .plan_bytes = h->plan_bytes,
                           .no_gpu = h->no_gpu};
    check_ok(tb__agent_create(&opts, &s->agent));
    check(pthread_create(&s->loop, NULL, seat_main, s) == 0);
}

static inline void seat_close(agent_scene *h, int position) {
    struct seat *s = &h->seats[position];
    void *status = NULL;
    if (!s->agent)
        return;
    tb__agent_stop(s->agent);
    check(pthread_join(s->loop, &status) == 0 && !status);
    tb__agent_destroy(s->agent);
    s->agent = NULL;
}

static inline void *program_main(void *arg) {
    rank *r = me = arg;
    if (setjmp(r->end) == 0)
        r->scene->body(r);
    me = NULL;
    return NULL;
}

static inline rank place_rank(agent_scene *h, int32_t i, int32_t na, int32_t nb) {
    rank r = {.scene = &h->scene, .group = i < na ? "a" : "b", .index = i < na ? i : i - na, .size = i < na ? na : nb};
    if (!h->groups)
        return r;
    r.group = h->groups[i];
    r.index = r.size = 0;
    for (int32_t j = 0; j < na + nb; j++) {
        bool is_same = strcmp(h->groups[j], r.group) == 0;
        r.index += is_same && j < i;
        r.size += is_same;
    }
    return r;
}

/* Runs `body` as programs, each with an agent: `na` in group "a", `nb` in group "b", unless the scene has other
 * groups. */
static inline void run_agent_scene(agent_scene *h, void (*body)(rank *r), int32_t na, int32_t nb) {
    scene *s = &h->scene;
    scene_init(s);
    s->body = body;
    s->nranks = na + nb;
    for (int32_t i = 0; i < na + nb; i++) {
        s->ranks[i] = place_rank(h, i, na, nb);
        seat_open(h, i);
    }
    for (int i = 0; i < s->nranks; i++)
        check(pthread_create(&s->ranks[i].thread, NULL, program_main, &s->ranks[i]) == 0);
    for (int i = 0; i < s->nranks; i++)
        pthread_join(s->ranks[i].thread, NULL);
    for (int i = 0; i < s->nranks; i++) {
        if (s->ranks[i].failure[0])
            print_error("%s\n", s->ranks[i].failure);
    }
    for (int i = s->nranks; i-- > 0;) /* the first has the store */
        seat_close(h, i);
    check(!s->has_failed);
    scene_fini(s);
}

static inline void run_agents(void (*body)(rank *r), int32_t na, int32_t nb) {
    agent_scene h = {0};
    run_agent_scene(&h, body, na, nb);
}

static inline program *open_client(const rank *r) {
    program *c = NULL;
    tb_world_opts opts = {.size = sizeof opts, .timeout_ms = PATIENCE_MS, .token = ((agent_scene *)r->scene)->token};
    check_ok(program_connect(seat_of(r)->path, &opts, &c));
    return c;
}

/* ---- The usual set-up, through an agent ------------------------------------------------------------------------ */

typedef struct client_setup {
    program *client;
    program_batch *batch;
    part w;
} client_setup;

static inline void move_in(rank *r, client_setup *s, const char *layout_a, const char *layout_b, int64_t rows,
                           int64_t columns) {
    const char *layout = is_a(r) ? layout_a : layout_b;
    part_init(&s->w, layout, r->index, rows, columns);
    part_poison(&s->w);
    s->client = open_client(r);
    check_ok(program_pair(s->client, "p", other_group(r), layout, 0));
    check_ok(program_batch_create(s->client, "step", NULL, &s->batch));
    tb_tensor w = part_tensor(&s->w);
    check_ok(program_add(s->batch, "p", "w", &w));
    check_ok(program_register(s->batch, 0));
}

static inline void move_out(client_setup *s) {
    program_batch_destroy(s->batch);
    program_close(s->client);
    part_fini(&s->w);
}

static inline void client_exchange(rank *r, client_setup *s, const char *from, uint32_t version) {
    bool is_send = strcmp(r->group, from) == 0;
    if (is_send)
        part_fill(&s->w, version);
    else
        part_poison(&s->w);
    check_ok(program_transfer(s->batch, is_send, NULL));
    check(part_holds(&s->w, version));
}

/* ---- Connections without a client behind them ------------------------------------------------------------------ */

typedef struct raw {
    int fd;
    uint64_t nframes;
    tb__frame_reader in;
    tb__arena arena;
} raw;

static inline void raw_open(raw *c, const char *path) {
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    *c = (raw){.fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)};
    snprintf(name.sun_path, sizeof name.sun_path, "%s", path);
    check(c->fd >= 0 && connect(c->fd, (const struct sockaddr *)&name, sizeof name) == 0);
}

static inline void raw_close(raw *c) {
    close(c->fd);
    tb__frame_reader_fini(&c->in);
    tb__arena_fini(&c->arena);
}

static inline bool raw_send(const raw *c, const void *data, size_t nbytes, const int *fds, size_t nfds) {
    union {
        char bytes[CMSG_SPACE(250 * sizeof(int))];
        struct cmsghdr align;
    } control = {{0}};
    struct iovec piece = {(void *)(uintptr_t)data, nbytes};
    struct msghdr message = {.msg_iov = &piece, .msg_iovlen = 1};
    if (nfds > 0) {
        message.msg_control = control.bytes;
        message.msg_controllen = CMSG_SPACE(nfds * sizeof *fds);
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(nfds * sizeof *fds);
        memcpy(CMSG_DATA(header), fds, nfds * sizeof *fds);
    }
    return sendmsg(c->fd, &message, MSG_NOSIGNAL) == (ssize_t)nbytes;
}

static inline uint64_t raw_post(raw *c, const tb__message *message) {
    tb__bytes frame = {0};
    check_ok(tb__message_encode(message, &frame));
    check(raw_send(c, frame.item, frame.count, NULL, 0));
    free(frame.item);
    return c->nframes++;
}

/* The next reply or event; false: the agent has hung up. Its text stays until the end. */
static inline bool raw_next(raw *c, tb__message *out) {
    for (;;) {
        tb__blob map;
        bool has_frame;
        check_ok(tb__frame_next(&c->in, &map, &has_frame));
        if (has_frame) {
            check_ok(tb__message_decode(map, &c->arena, out));
            return true;
        }
        uint8_t *room;
        size_t nbytes;
        struct pollfd readable = {.fd = c->fd, .events = POLLIN};
        check(poll(&readable, 1, PATIENCE_MS) == 1);
        check_ok(tb__frame_room(&c->in, &room, &nbytes));
        ssize_t n = recv(c->fd, room, nbytes, 0);
        tb__frame_filled(&c->in, n > 0 ? (size_t)n : 0);
        if (n <= 0)
            return false;
    }
}

/* The next reply, whichever command it answers. */
static inline bool raw_reply(raw *c, tb__message *out) {
    if (!raw_next(c, out))
        return false;
    check(out->kind == TB__REPLY);
    return true;
}

static inline tb__message raw_call(raw *c, const tb__message *message) {
    tb__message reply;
    uint64_t seq = raw_post(c, message);
    check(raw_reply(c, &reply) && reply.seq == seq);
    return reply;
}

static inline void raw_greet(raw *c, const char *path) {
    raw_open(c, path);
    tb__message hello = {.kind = TB__HELLO, .protocol = TB__PROTOCOL_VERSION, .client = "raw"};
    check(raw_call(c, &hello).status == TB_OK);
}

#endif
