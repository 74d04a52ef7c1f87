/* Two clients of the embedded store's server, from their first byte on. The input is a list of a byte and a frame: the
 * byte says whose frame it is (bit 0), and whether the proof in it is replaced by the right one (bit 1), so that what
 * comes after a hello is reached. Nobody may read or change anything before a right proof. */
#include "bus/store/session.h"
#include "fuzz.h"

enum { NSESSIONS = 2 };

typedef struct scene {
    tb__store_server server;
    tb__session *session[NSESSIONS];
    bool has_right_proof[NSESSIONS];
} scene;

static void make_scene(scene *s) {
    tb__store_server *server = &s->server;
    snprintf(server->endpoint.listener.address.url, sizeof server->endpoint.listener.address.url, "fuzz");
    tb__proof_key_derive("a token of the fuzz target, long enough", TB__STORE_PURPOSE, &server->key);
    server->table.max_nbytes = 1 << 20;
    server->table.changed = tb__wake_waiters;
    server->table.context = server;
    LIST_INIT(&server->sessions);
    LIST_INIT(&server->waiters);
    TAILQ_INIT(&server->pending_hello);
    TAILQ_INIT(&server->dirty);
    for (int i = 0; i < NSESSIONS; i++) {
        tb__session *session = s->session[i] = calloc(1, sizeof *session);
        expect(session);
        session->server = server;
        LIST_INIT(&session->waiters);
        LIST_INSERT_HEAD(&server->sessions, session, link);
        TAILQ_INSERT_TAIL(&server->pending_hello, session, pending_hello);
    }
}

static void free_scene(scene *s) {
    s->server.table.changed = NULL;
    for (int i = 0; i < NSESSIONS; i++) {
        tb__session_drop_waiters(s->session[i]);
        free(s->session[i]->connection.out.item);
        free(s->session[i]);
    }
    tb__store_table_fini(&s->server.table);
    free(s);
}

/* The frame's size; 0: it is incomplete or refused. */
static size_t serve_frame(scene *s, uint8_t how, const uint8_t *data, size_t size) {
    int i = how & 1;
    tb__session *session = s->session[i];
    tb__store_message m;
    uint8_t proof[TB__PROOF_NBYTES];
    tb__frame_reader reader = {.bytes = {.item = (uint8_t *)(uintptr_t)data, .count = size},
                               .max_nbytes = session->has_proved ? TB__STORE_MAX_REQUEST : TB__STORE_MAX_HELLO};
    tb__blob frame;
    bool has_frame;
    if (!succeeded(tb__frame_next(&reader, &frame, &has_frame)) || !has_frame ||
        !succeeded(tb__store_decode(frame, &m)))
        return 0;
    if (m.op == TB__STORE_PROVE && !m.is_reply && (how & 2) && session->has_hello) {
        tb__proof_make(&s->server.key, "client", TB__STORE_VERSION, &session->peer, &session->mine, proof);
        m.value = (tb__blob){proof, sizeof proof};
        s->has_right_proof[i] = true;
    }
    uint64_t before = s->server.table.revision;
    bool had_proved = session->has_proved, is_over = session->is_closing;
    if (!is_over)
        tb__session_serve(session, &m);
    expect(had_proved || s->server.table.revision == before);
    expect(!session->has_proved || s->has_right_proof[i]);
    return reader.taken;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    scene *s = calloc(1, sizeof *s);
    expect(s);
    make_scene(s);
    for (size_t done = 0, used;
         done + 1 < size && (used = serve_frame(s, data[done], data + done + 1, size - done - 1));)
        done += 1 + used;
    /* One owner has at most one session that goes on. */
    const tb__session *a = s->session[0], *b = s->session[1];
    static const tb__key_owner nobody;
    if (a->has_proved && b->has_proved && !a->is_closing && !b->is_closing)
        expect(memcmp(&a->owner, &b->owner, sizeof nobody) != 0 || memcmp(&a->owner, &nobody, sizeof nobody) == 0);
    free_scene(s);
    return 0;
}
