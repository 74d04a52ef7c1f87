/* Checks the store of --store step by step, so that the step that fails determines the remedy. */
#include "tools/doctor.h"

#include "base/process.h"
#include "bus/store/address.h"
#include "bus/store/curl.h"
#include "bus/store/store.h"

#include <errno.h>
#include <netdb.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { TIMEOUT_MS = 5000 };

static const char give_token[] = "give the store's token: --token-file FILE";

/* The error of a step that failed, or notes on one that did not. */
typedef struct visit {
    const char *remedy;
    tb__numeric loopback; /* the address of the store's name here, if other hosts must use another one */
} visit;

static const char *remedy_of_errno(int error, bool is_unix) {
    switch (error) {
    case ENOENT:
    case ENOTDIR:
        return "start it: tensorbus store --listen URL; a Unix socket is for the processes of one host";
    case ECONNREFUSED:
        return is_unix ? "start it: tensorbus store --listen URL"
                       : "start it: tensorbus store --listen tcp://0.0.0.0:PORT, which listens at all its addresses";
    case EAGAIN:
    case ETIMEDOUT:
        return is_unix ? "end the process that listens there and accepts nobody, and start the store"
                       : "let its port through, where a firewall is in between; its host has to be up";
    case EHOSTUNREACH:
    case ENETUNREACH:
        return "let its host be up, and a route lead there: ip route get ADDRESS";
    case EACCES:
    case EPERM:
        return is_unix ? "run this as the store's user, or give the store a tcp:// URL"
                       : "let the firewall of this host, or its security module, allow the connection";
    default:
        return "let the system allow a connection to it";
    }
}

static const char *remedy_of_talk(tb_status status) {
    switch (status) {
    case TB_DENIED:
        return give_token;
    case TB_REFUSED:
        return "use the same release of tensorbus at both ends";
    case TB_TIMEOUT:
        return "give the store's own port: what listens there says nothing, or is a store that was stopped";
    default:
        return "give the store's own port: what listens there is no tensorbus store; etcd is etcd://HOST:PORT";
    }
}

static tb_status talk(const doctor *d) {
    tb__store *store = NULL;
    tb__store_value value = {0};
    tb_status status = tb__store_open(d->store, d->token, TIMEOUT_MS, &store);
    if (status == TB_OK)
        status = tb__store_get(store, "doctor", &value);
    tb__store_value_fini(&value);
    tb__store_close(store);
    return status;
}

static tb_status visit_name(const tb__address *address, visit *v) {
    struct addrinfo *names;
    v->remedy = "let the name be found here, by DNS or /etc/hosts, or give an address";
    TB_TRY(tb__resolve(address, tb__now_ms() + TIMEOUT_MS, &names));
    if (tb__is_loopback(names) && !tb__store_url_is_local(address->url))
        v->loopback = tb__numeric_of(names);
    freeaddrinfo(names);
    return TB_OK;
}

static tb_status visit_embedded(const doctor *d, visit *v) {
    tb__store_url parts;
    tb__address address;
    int fd, error;
    TB_TRY(tb__store_url_split(d->store, &parts));
    TB_TRY(tb__address_parse(parts.base, &address));
    if (!address.is_unix)
        TB_TRY(visit_name(&address, v));
    tb_status status = tb__address_connect(&address, tb__now_ms() + TIMEOUT_MS, &fd, &error);
    bool is_connected = status == TB_OK;
    if (is_connected)
        status = tb__address_check_server(&address, fd);
    if (is_connected)
        tb__fd_close(fd);
    v->remedy = status == TB_DENIED ? "run this as the user who serves it, or give the store a tcp:// URL"
                                    : remedy_of_errno(error, address.is_unix);
    TB_TRY(status);
    status = talk(d);
    v->remedy = remedy_of_talk(status);
    return status;
}

static const char *remedy_of_etcd(tb_status status) {
    switch (status) {
    case TB_DENIED:
        return "give the store's token: --token-file FILE; or what etcd asks for: ?ca=FILE&user=FILE&password=FILE";
    case TB_REFUSED:
        return "give the port at which etcd 3.4 or later has its clients, 2379 mostly";
    case TB_TIMEOUT:
        return "let its port through, where a firewall is in between, and see to it that etcd has a leader";
    default:
        return "start etcd, and let its name be found here";
    }
}

static tb_status visit_etcd(const doctor *d, visit *v) {
    const tb__curl *curl;
    v->remedy = "apt-get install libcurl4, or use a store that is not etcd";
    TB_TRY(tb__curl_load(&curl));
    tb_status status = talk(d);
    v->remedy = remedy_of_etcd(status);
    return status;
}

void doctor_store(doctor *d, const char *name) {
    visit v = {0};
    if (!d->store)
        return;
    tb_status status = tb__store_is_embedded(d->store) ? visit_embedded(d, &v) : visit_etcd(d, &v);
    d->is_refused = status == TB_INVALID;
    if (d->is_refused)
        return;
    if (status != TB_OK)
        doctor_add(d, DOCTOR_FAILED, name, v.remedy, "%s", tb_error_detail());
    else if (*v.loopback.text)
        doctor_add(d, DOCTOR_OK, name, "ask on another host, too: tensorbus doctor --store URL",
                   "%s answers, at %s, which says nothing of other hosts", d->store, v.loopback.text);
    else
        doctor_add(d, DOCTOR_OK, name, NULL, "%s answers%s", d->store,
                   tb__store_url_is_local(d->store) ? "; processes of other hosts can't reach it" : "");
}
