/* What a rank receives from UCX: hellos, which are tagged messages, and active messages. UCX itself is replaced by
 * functions that send nothing. The input is a list of a byte, a length (u16) and that many bytes. The byte's bit 0: an
 * active message, whose first bytes are the frame; else a hello. Bit 1: it gets the right code, secret id or proof, so
 * that what comes after it is reached. Without a right code nothing is kept, and without a right proof nobody belongs
 * to the bus. */
#include "base/checksum.h"
#include "fuzz.h"
#include "transport/ucx/ucx.h"

enum { HEAD = sizeof(ucx_frame) + sizeof(ucx_challenge) };

static const uint8_t *hello;
static size_t hello_nbytes;

static ucs_status_ptr_t receive_tag(ucp_worker_h worker, void *buffer, size_t count, ucp_tag_t tag, ucp_tag_t mask,
                                    const ucp_request_param_t *param) {
    (void)worker, (void)tag, (void)mask;
    static char under_way;
    if (!hello)
        return &under_way;
    size_t n = hello_nbytes < count ? hello_nbytes : count;
    memcpy(buffer, hello, n);
    param->recv_info.tag_info->length = n;
    hello = NULL;
    return NULL;
}

static ucs_status_t make_endpoint(ucp_worker_h worker, const ucp_ep_params_t *params, ucp_ep_h *out) {
    (void)worker, (void)params;
    static char endpoint;
    *out = (ucp_ep_h)(void *)&endpoint;
    return UCS_OK;
}

static ucs_status_ptr_t close_endpoint(ucp_ep_h ep, const ucp_request_param_t *param) {
    (void)ep, (void)param;
    return NULL;
}

static ucs_status_ptr_t send_tag(ucp_ep_h ep, const void *data, size_t count, ucp_tag_t tag,
                                 const ucp_request_param_t *param) {
    (void)ep, (void)data, (void)count, (void)tag, (void)param;
    return NULL;
}

static ucs_status_ptr_t send_active(ucp_ep_h ep, unsigned id, const void *header, size_t header_nbytes,
                                    const void *data, size_t count, const ucp_request_param_t *param) {
    (void)ep, (void)id, (void)header, (void)header_nbytes, (void)data, (void)count, (void)param;
    return NULL;
}

static const ucx_functions functions = {.tag_recv_nbx = receive_tag,
                                        .ep_create = make_endpoint,
                                        .ep_close_nbx = close_endpoint,
                                        .tag_send_nbx = send_tag,
                                        .am_send_nbx = send_active};

/* A hello with the right code, from a process whose address is well-formed. */
static void mend_hello(const ucx *u, uint8_t *data, size_t nbytes) {
    ucx_address head = {.magic = UCX_MAGIC, .version = UCX_VERSION, .id = 7};
    memset(data + sizeof(ucx_frame) + offsetof(ucx_challenge, code), 0, TB__SHA256_NBYTES);
    if (nbytes >= HEAD + sizeof head) {
        memcpy(&head.id, data + HEAD + offsetof(ucx_address, id), sizeof head.id);
        head.nbytes = nbytes - HEAD - sizeof head;
        head.checksum = tb__checksum(data + HEAD + sizeof head, head.nbytes);
        memcpy(data + HEAD, &head, sizeof head);
        ucx_frame frame;
        memcpy(&frame, data, sizeof frame);
        frame.number %= 8; /* an end makes as many endpoints, which takes its time */
        frame.from = ucx_connection_id(head.id, frame.number > 1 ? frame.number : 1);
        memcpy(data, &frame, sizeof frame);
    }
    uint8_t code[TB__SHA256_NBYTES];
    tb__hmac_sha256(u->key.bytes, sizeof u->key.bytes, data, nbytes, code);
    memcpy(data + sizeof(ucx_frame) + offsetof(ucx_challenge, code), code, sizeof code);
}

static void take_active(ucx *u, uint8_t *data, size_t nbytes, bool is_right, bool *has_proof) {
    ucx_frame frame;
    if (nbytes < sizeof frame)
        return;
    memcpy(&frame, data, sizeof frame);
    const ucx_peer *peer = ucx_find(u, frame.rank);
    uint8_t *body = data + sizeof frame;
    size_t body_nbytes = nbytes - sizeof frame;
    if (is_right && peer) {
        frame.from = peer->id_in;
        frame.serial = frame.serial % 4 ? peer->serial_in : frame.serial;
    }
    if (is_right && peer && frame.kind == UCX_PROOF && body_nbytes == TB__PROOF_NBYTES) {
        tb__proof_make(&u->key, "rank", UCX_VERSION, &peer->theirs, &peer->mine, body);
        *has_proof = true;
    }
    if (frame.kind != UCX_HELLO)
        ucx_on_active_message(u, &frame, sizeof frame, body, body_nbytes, &(ucp_am_recv_param_t){0});
}

static void take_record(ucx *u, uint8_t how, uint8_t *data, size_t nbytes, bool *has_code, bool *has_proof) {
    bool is_right = how & 2;
    if (how & 1) {
        take_active(u, data, nbytes, is_right, has_proof);
        return;
    }
    if (is_right && nbytes >= HEAD) {
        mend_hello(u, data, nbytes);
        *has_code = true;
    }
    hello = data;
    hello_nbytes = nbytes;
    (void)succeeded(ucx_receive_hellos(u));
    hello = NULL;
}

static void close_all(ucx *u) {
    for (size_t i = 0; i < u->peers.count; i++)
        ucx_drop_messages(u, u->peers.item[i], TB_CANCELLED);
    for (size_t i = 0; i < u->peers.count; i++) {
        ucx_drop_queued(u->peers.item[i]);
        ucx_free_peer(u->peers.item[i]);
    }
    for (size_t i = 0; i < u->retired.count; i++)
        ucx_free_peer(u->retired.item[i]);
    ucx_free_transfers(u);
    tb__match_free(&u->early, -1);
    free(u->peers.item);
    free(u->retired.item);
    free(u->descriptors.item);
    free(u->ports.item);
    free(u->listeners.item);
    tb__index_fini(&u->by_rank);
    free(u->hello);
    free(u);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static unsigned char address[sizeof(ucx_address) + 8];
    ucx *u = calloc(1, sizeof *u);
    expect(u);
    bool has_code = false, has_proof = false;
    tb__ucx_direct = 0;
    tb__ucx_has_backup_driver = false;
    u->lock = (pthread_mutex_t)PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
    u->call = &functions;
    u->env.rank = 0;
    u->id = 1;
    u->address = address;
    u->address_nbytes = sizeof address;
    u->epoll = u->wake = u->timer = u->guard = u->quit = -1;
    for (size_t at = 0; at + 3 <= size;) {
        size_t nbytes = data[at + 1] | (size_t)data[at + 2] << 8;
        uint8_t how = data[at];
        at += 3;
        if (nbytes > size - at)
            nbytes = size - at;
        uint8_t *copy = malloc(nbytes + 1); /* of exactly this size, so that a read past its end is seen */
        expect(copy);
        memcpy(copy, data + at, nbytes);
        take_record(u, how, copy, nbytes, &has_code, &has_proof);
        free(copy);
        at += nbytes;
    }
    size_t nstrangers = 0;
    for (size_t i = 0; i < u->peers.count; i++) {
        nstrangers += u->peers.item[i]->is_stranger && !ucx_has_failed(u->peers.item[i]);
        expect(!u->peers.item[i]->has_hello || has_proof);
    }
    expect(nstrangers <= UCX_STRANGERS);
    expect(has_code || u->peers.count == 0);
    u->address = NULL;
    close_all(u);
    return 0;
}
