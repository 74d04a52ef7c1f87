/* Resolves names by a deadline: getaddrinfo has no timeout, so it runs in a thread that is abandoned then. */
#include "bus/store/address.h"

#include "base/mem.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <string.h>
#include <sys/socket.h>

/* Freed by the caller or the thread, whichever is done last. */
typedef struct lookup {
    pthread_mutex_t lock;
    pthread_cond_t finished;
    tb__address address;
    bool is_done, is_abandoned;
    int error;
    struct addrinfo *result;
} lookup;

static const struct addrinfo numeric = {
    .ai_socktype = SOCK_STREAM, .ai_family = AF_UNSPEC, .ai_flags = AI_NUMERICHOST | AI_NUMERICSERV};
static const struct addrinfo by_name = {.ai_socktype = SOCK_STREAM, .ai_family = AF_UNSPEC, .ai_flags = AI_NUMERICSERV};

static void free_lookup(lookup *l) {
    if (l->result)
        freeaddrinfo(l->result);
    pthread_cond_destroy(&l->finished);
    pthread_mutex_destroy(&l->lock);
    free(l);
}

static void *run_lookup(void *arg) {
    lookup *l = arg;
    struct addrinfo *result = NULL;
    int error = getaddrinfo(l->address.host, l->address.port, &by_name, &result);
    pthread_mutex_lock(&l->lock);
    l->error = error;
    l->result = error == 0 ? result : NULL;
    l->is_done = true;
    bool is_abandoned = l->is_abandoned;
    pthread_cond_signal(&l->finished);
    pthread_mutex_unlock(&l->lock);
    if (is_abandoned)
        free_lookup(l);
    return NULL;
}

tb_status tb__resolve(const tb__address *address, int64_t deadline_ms, struct addrinfo **out) {
    if (getaddrinfo(address->host, address->port, &numeric, out) == 0)
        return TB_OK;
    lookup *l = tb__calloc(1, sizeof *l);
    if (!l)
        return TB_NO_MEMORY;
    l->address = *address;
    pthread_mutex_init(&l->lock, NULL);
    tb__monotonic_cond_init(&l->finished);
    pthread_t thread;
    tb_status status = tb__start_thread(&thread, "tb-resolve", run_lookup, l);
    if (status != TB_OK) {
        free_lookup(l);
        return status;
    }
    struct timespec until = tb__time_of_ms(deadline_ms);
    pthread_mutex_lock(&l->lock);
    while (!l->is_done && pthread_cond_timedwait(&l->finished, &l->lock, &until) == 0)
        ;
    bool is_done = l->is_done;
    l->is_abandoned = !is_done;
    pthread_mutex_unlock(&l->lock);
    if (!is_done) {
        pthread_detach(thread);
        return tb__fail(TB_TIMEOUT, "%s: the name '%s' was not found in time", address->url, address->host);
    }
    pthread_join(thread, NULL);
    if (l->error != 0) {
        status = tb__fail(TB_IO, "%s: the name '%s': %s", address->url, address->host, gai_strerror(l->error));
    } else {
        *out = l->result;
        l->result = NULL;
    }
    free_lookup(l);
    return status;
}

bool tb__is_loopback(const struct addrinfo *names) {
    for (; names; names = names->ai_next) {
        if (names->ai_family == AF_INET6) {
            if (!IN6_IS_ADDR_LOOPBACK(&((const struct sockaddr_in6 *)names->ai_addr)->sin6_addr))
                return false;
        } else if (ntohl(((const struct sockaddr_in *)names->ai_addr)->sin_addr.s_addr) >> 24 != IN_LOOPBACKNET) {
            return false;
        }
    }
    return true;
}

tb__numeric tb__numeric_of(const struct addrinfo *names) {
    tb__numeric out = {""};
    getnameinfo(names->ai_addr, names->ai_addrlen, out.text, sizeof out.text, NULL, 0, NI_NUMERICHOST);
    return out;
}
