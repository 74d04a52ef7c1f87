/* The store in a real etcd that speaks TLS only and asks for a user and a password. */
#include "bus/store/etcd_test.h"

#include "bus/store/gateway.h"

enum { TTL_S = 1 }; /* of a login */

typedef struct fixture {
    etcd e;
    char store[1024]; /* URL with CA, user and password */
} fixture;

static void run(const char *folder, const char *command) {
    char line[2048];
    snprintf(line, sizeof line, "cd '%s' && { %s; } >>log 2>&1", folder, command);
    if (system(line) != 0) // NOLINT(cert-env33-c)
        fail_msg("%s", command);
}

static void write_line(const char *folder, const char *name, const char *text) {
    char path[128];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    fprintf(file, "%s\n", text);
    assert_int_equal(fclose(file), 0);
}

/* A CA, and what it has signed for 127.0.0.1; another CA that has signed nothing. */
static void make_certificates(const char *folder) {
    write_line(folder, "san", "subjectAltName=IP:127.0.0.1");
    run(folder, "openssl req -x509 -newkey rsa:2048 -nodes -keyout ca.key -out ca.pem -subj /CN=ca -days 2");
    run(folder, "openssl req -x509 -newkey rsa:2048 -nodes -keyout other.key -out other.pem -subj /CN=other -days 2");
    run(folder, "openssl req -newkey rsa:2048 -nodes -keyout etcd.key -out etcd.csr -subj /CN=etcd");
    run(folder, "openssl x509 -req -in etcd.csr -CA ca.pem -CAkey ca.key -CAcreateserial -out etcd.pem -days 2 "
                "-extfile san");
}

static void run_etcd(etcd *e) {
    char client[64], peer[64], cluster[80], path[4][96], ttl[8];
    static const char *const names[] = {"data", "etcd.pem", "etcd.key", "log"};
    snprintf(client, sizeof client, "https://127.0.0.1:%d", e->port[0]);
    snprintf(peer, sizeof peer, "http://127.0.0.1:%d", e->port[1]);
    snprintf(cluster, sizeof cluster, "default=%s", peer);
    snprintf(ttl, sizeof ttl, "%d", TTL_S);
    for (int i = 0; i < 4; i++)
        snprintf(path[i], sizeof path[i], "%s/%s", e->folder, names[i]);
    pid_t parent = getpid();
    e->pid = fork();
    if (e->pid == 0) {
        int fd = open(path[3], O_WRONLY | O_CREAT | O_APPEND, 0600);
        dup2(fd, 1);
        dup2(fd, 2);
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() == parent)
            execlp("etcd", "etcd", "--data-dir", path[0], "--listen-client-urls", client, "--advertise-client-urls",
                   client, "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster",
                   cluster, "--cert-file", path[1], "--key-file", path[2], "--auth-token-ttl", ttl, (char *)NULL);
        _exit(127);
    }
    assert_true(e->pid > 0);
}

/* Asks etcd as its clients do. */
static void ask(const char *url, const char *path, const char *body) {
    tb__store_url parts;
    tb__gateway *gateway;
    json_t *reply;
    tb__gateway_call call = {.path = path, .deadline_ms = tb__now_ms() + PATIENCE_MS};
    assert_ok(tb__store_url_split(url, &parts));
    assert_ok(tb__gateway_create(&parts, &gateway));
    assert_ok(tb__gateway_post(gateway, &call, json_loads(body, 0, NULL), &reply));
    json_decref(reply);
    tb__gateway_destroy(gateway);
}

static int set_up(void **state) {
    fixture *f = calloc(1, sizeof *f);
    etcd *e = &f->e;
    char url[256];
    *e = (etcd){.folder = "/tmp/tb-etcd-XXXXXX"};
    assert_non_null(mkdtemp(e->folder));
    for (int i = 0; i < 2; i++)
        e->held[i] = hold_port(&e->port[i]);
    make_certificates(e->folder);
    write_line(e->folder, "root", "root");
    write_line(e->folder, "root.password", "of the root");
    write_line(e->folder, "user", "tensorbus");
    write_line(e->folder, "password", "right \"horse\"");
    write_line(e->folder, "wrong", "wrong");
    run_etcd(e);
    snprintf(url, sizeof url, "etcd://127.0.0.1:%d?ca=%s/ca.pem", e->port[0], e->folder);
    ask(url, "/v3/auth/role/add", "{\"name\":\"root\"}"); /* tries until etcd is there */
    ask(url, "/v3/auth/user/add", "{\"name\":\"root\",\"password\":\"of the root\"}");
    ask(url, "/v3/auth/user/grant", "{\"user\":\"root\",\"role\":\"root\"}");
    ask(url, "/v3/auth/role/add", "{\"name\":\"bus\"}");
    /* "tensorbus/" to "tensorbus0": all keys of ours */
    ask(url, "/v3/auth/role/grant",
        "{\"name\":\"bus\",\"perm\":{\"permType\":\"READWRITE\",\"key\":\"dGVuc29yYnVzLw==\",\"range_end\":"
        "\"dGVuc29yYnVzMA==\"}}");
    ask(url, "/v3/auth/user/add", "{\"name\":\"tensorbus\",\"password\":\"right \\\"horse\\\"\"}");
    ask(url, "/v3/auth/user/grant", "{\"user\":\"tensorbus\",\"role\":\"bus\"}");
    ask(url, "/v3/auth/enable", "{}");
    snprintf(f->store, sizeof f->store, "%s&user=%s/user&password=%s/password", url, e->folder, e->folder);
    *state = f;
    return 0;
}

static int tear_down(void **state) {
    fixture *f = *state;
    etcd_stop(&f->e);
    free(f);
    return 0;
}

static void assert_text(tb__store *store, const char *key, const char *text) {
    tb__store_value value;
    assert_ok(tb__store_get(store, key, &value));
    assert_string_equal(value.data, text);
    tb__store_value_fini(&value);
}

static void works(void **state) {
    const fixture *f = *state;
    tb__store *a = open_store(f->store), *b = open_store(f->store);
    uint64_t before;
    set_text(a, "k", "v");
    assert_text(b, "k", "v");
    assert_ok(tb__store_count(a, "c", 0, 1, &before));
    waiting w = {.store = b};
    begin_waiting(&w);
    set_text(a, "key", "there");
    assert_ok(end_waiting(&w));
    tb__store_close(a);
    tb__store_close(b);
}

/* etcd forgets a login after a second, and its lease has to be renewed meanwhile: it is renewed. */
static void login_expires(void **state) {
    const fixture *f = *state;
    tb__store *store = open_store(f->store);
    assert_ok(tb__store_set(store, "e", "x", 1, TB__STORE_EPHEMERAL, NULL));
    for (int i = 0; i < 4; i++) {
        poll(NULL, 0, (TTL_S * 1000 + 500) * (1 + (i == 3))); /* at the end, longer than the lease */
        set_text(store, "k", "later");
        assert_text(store, "k", "later");
        assert_text(store, "e", "x");
    }
    tb__store_close(store);
}

/* With the process go all logins. */
static void etcd_is_restarted(void **state) {
    fixture *f = *state;
    tb__store *store = open_store(f->store);
    set_text(store, "k", "before");
    etcd_kill(&f->e);
    run_etcd(&f->e);
    assert_text(store, "k", "before");
    set_text(store, "k", "after");
    tb__store_close(store);
}

static void assert_refused(const fixture *f, const char *query, tb_status status, const char *text) {
    char url[1024];
    tb__store *store;
    snprintf(url, sizeof url, "etcd://127.0.0.1:%d%s", f->e.port[0], query);
    for (char *at; (at = strchr(url, '~'));) { /* the folder */
        char rest[1024];
        snprintf(rest, sizeof rest, "%s", at + 1);
        snprintf(at, sizeof url - (size_t)(at - url), "%s%s", f->e.folder, rest);
    }
    assert_fails(tb__store_open(url, TOKEN, PATIENCE_MS, &store), status, text);
}

static void refused(void **state) {
    const fixture *f = *state;
    assert_refused(f, "?ca=~/other.pem", TB_DENIED, "is not trusted with the CA");
    assert_refused(f, "?ca=~/none", TB_INVALID, "can't read the CA");
    assert_refused(f, "?ca=~/ca.pem", TB_INVALID, "user name is empty");
    assert_refused(f, "?ca=~/ca.pem&user=~/user&password=~/wrong", TB_DENIED, "logging in as 'tensorbus'");
    assert_refused(f, "?ca=~/ca.pem&user=~/wrong&password=~/password", TB_DENIED, "logging in as 'wrong'");
    assert_refused(f, "?ca=~/ca.pem&user=~/none&password=~/password", TB_INVALID, "can't read");
    assert_refused(f, "?ca=~/ca.pem&user=~/user", TB_INVALID, "user and password go together");
    assert_refused(f, "?user=~/user&password=~/password", TB_INVALID, "over TLS only");
    tb__store *store;
    char plain[64];
    snprintf(plain, sizeof plain, "etcd://127.0.0.1:%d", f->e.port[0]);
    tb_status status = tb__store_open(plain, TOKEN, 300, &store); /* etcd 3.5 answers, 3.4 does not */
    assert_true(status == TB_TIMEOUT || status == TB_REFUSED);
    assert_fails(tb__store_open("tcp://127.0.0.1:1?ca=/x", TOKEN, PATIENCE_MS, &store), TB_INVALID, "are for etcd");
}

int main(void) {
    if (etcd_is_missing())
        return SKIPPED;
    if (system("openssl version >/dev/null 2>&1") != 0) { // NOLINT(cert-env33-c)
        printf("skipped: openssl is not installed\n");
        return SKIPPED;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(works),
        cmocka_unit_test(refused),
        cmocka_unit_test(login_expires),
        cmocka_unit_test(etcd_is_restarted),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
