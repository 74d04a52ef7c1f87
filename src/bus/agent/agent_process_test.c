/* Agents as processes: whose memory it is, who may come, and what happens when an agent stops, dies and comes back. */
#include "bus/agent/process_test.h"
#include "bus/protocol/payload.h"
#include "bus/protocol/protocol.h"

#include <grp.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

static program *open_client(const agent_process *a) {
    program *c = NULL;
    tb_world_opts opts = {.size = sizeof opts, .timeout_ms = PATIENCE_MS};
    assert_ok(program_connect(a->path, &opts, &c));
    return c;
}

/* Until SIGCONT. */
static void stop_agent(const agent_process *a) {
    assert_int_equal(kill(a->pid, SIGSTOP), 0);
    assert_int_equal(waitpid(a->pid, NULL, WUNTRACED), a->pid); /* its threads run on until then */
}

/* ---- A program for both agents, whose calls wait for each other ------------------------------------------------ */

typedef struct call {
    program *client;
    program_batch *batch;
    enum { INIT, REGISTER, TRANSFER } what;
    int side;
    tb_status status;
    char why[512];
    int64_t ended_ms;
    pthread_t thread;
} call;

static void *call_main(void *arg) {
    call *c = arg;
    if (c->what == INIT)
        c->status = program_pair(c->client, "p", two_groups[!c->side], "mesh=1 place=R", 0);
    else if (c->what == REGISTER)
        c->status = program_register(c->batch, 0);
    else
        c->status = program_transfer(c->batch, c->side == 0, NULL);
    c->ended_ms = tb__now_ms();
    if (c->status != TB_OK)
        snprintf(c->why, sizeof c->why, "%s", tb_error_detail());
    return NULL;
}

static void begin_call(call *c, int what) {
    c->what = what;
    assert_int_equal(pthread_create(&c->thread, NULL, call_main, c), 0);
}

static void end_call(call *c) {
    assert_int_equal(pthread_join(c->thread, NULL), 0);
}

static void call_both(call calls[2], int what) {
    for (int i = 0; i < 2; i++)
        begin_call(&calls[i], what);
    for (int i = 0; i < 2; i++) {
        end_call(&calls[i]);
        if (calls[i].status != TB_OK)
            fail_msg("%s: %s", two_groups[i], calls[i].why);
    }
}

static void move_in(const two_agents *s, call calls[2], void *const data[2], int64_t count) {
    for (int i = 0; i < 2; i++) {
        if (!calls[i].client)
            calls[i] = (call){.client = open_client(&s->agents[i]), .side = i};
    }
    call_both(calls, INIT);
    for (int i = 0; i < 2; i++) {
        tb_tensor t = {.size = sizeof t, .data = data[i], .dtype = TB_U8, .ndim = 1, .shape = {count}};
        assert_ok(program_batch_create(calls[i].client, "step", NULL, &calls[i].batch));
        assert_ok(program_add(calls[i].batch, "p", "w", &t));
    }
    call_both(calls, REGISTER);
}

static void move_out(call calls[2]) {
    for (int i = 0; i < 2; i++) {
        program_batch_destroy(calls[i].batch);
        program_close(calls[i].client);
    }
}

/* ---- Memory ---------------------------------------------------------------------------------------------------- */

/* Whether this process has mapped the file, too: `which` is its device and inode, as in the line of a mapping. */
static bool has_mapped(const char *which) {
    char line[512];
    bool found = false;
    FILE *file = fopen("/proc/self/maps", "re");
    assert_non_null(file);
    while (!found && fgets(line, sizeof line, file))
        found = strstr(line, which);
    fclose(file);
    return found;
}

/* What a process has in files of its own, which this one, its client, does not have. */
static long own_kib(pid_t pid) {
    char path[64], line[512], which[128];
    bool is_own = false;
    long total = 0;
    snprintf(path, sizeof path, "/proc/%d/smaps", (int)pid);
    FILE *file = fopen(path, "re");
    assert_non_null(file);
    while (fgets(line, sizeof line, file)) {
        char device[32];
        unsigned long inode;
        if (sscanf(line, "%*x-%*x %*s %*x %31s %lu", device, &inode) == 2) {
            snprintf(which, sizeof which, " %s %lu ", device, inode);
            is_own = strstr(line, "/memfd:") && !has_mapped(which);
        } else if (is_own && strncmp(line, "Rss:", 4) == 0) {
            total += strtol(line + 4, NULL, 10);
        }
    }
    fclose(file);
    return total;
}

/* Memory of tb_alloc is used where it is; of other memory there is a copy in the agent, until the batch is gone. */
static void test_memory(void **state) {
    const two_agents *s = *state;
    enum { MIB = 48 };
    size_t nbytes = (size_t)MIB << 20;
    for (int is_shared = 0; is_shared < 2; is_shared++) {
        void *data[2];
        long before[2], grown[2];
        call calls[2] = {0};
        for (int i = 0; i < 2; i++) {
            if (is_shared)
                assert_ok(tb_alloc(nbytes, &data[i]));
            else
                assert_non_null(data[i] = malloc(nbytes));
            memset(data[i], 1 + i, nbytes);
            before[i] = own_kib(s->agents[i].pid);
        }
        move_in(s, calls, data, (int64_t)nbytes);
        call_both(calls, TRANSFER);
        for (int i = 0; i < 2; i++)
            grown[i] = own_kib(s->agents[i].pid) - before[i];
        assert_memory_equal(data[0], data[1], nbytes);
        assert_int_equal(((char *)data[1])[nbytes - 1], 1);
        for (int i = 0; i < 2; i++) {
            if (is_shared ? grown[i] > (MIB << 10) / 4 : grown[i] < MIB << 10)
                fail_msg("agent %s has %ld KiB more of its own", two_groups[i], grown[i]);
        }
        move_out(calls);
        for (int i = 0; i < 2; i++) {
            if (is_shared)
                tb_free(data[i]);
            else
                free(data[i]);
        }
    }
}

/* ---- Who may come ---------------------------------------------------------------------------------------------- */

static void test_other_user(void **state) {
    const two_agents *s = *state;
    struct stat info;
    assert_int_equal(stat(s->agents[0].path, &info), 0);
    assert_int_equal(info.st_mode & 0777, 0600);
    if (geteuid() != 0) {
        print_message("only root can be somebody else\n");
        skip();
    }
    /* The file's mode is the first thing in the way; the agent itself is, where that has been changed. */
    for (int is_open = 0; is_open < 2; is_open++) {
        if (is_open)
            assert_true(chmod(s->agents[0].path, 0666) == 0 && chmod(s->folder, 0755) == 0);
        pid_t pid = fork();
        assert_true(pid >= 0);
        if (pid == 0) {
            program *c = NULL;
            tb_world_opts opts = {.size = sizeof opts, .timeout_ms = PATIENCE_MS};
            if (setgroups(0, NULL) != 0 || setgid(65534) != 0 || setuid(65534) != 0)
                _exit(9);
            tb_status status = program_connect(s->agents[0].path, &opts, &c);
            bool is_right =
                status == TB_DENIED && strstr(tb_error_detail(), is_open ? "user 65534 may not" : "another user's");
            _exit(is_right ? 0 : 1);
        }
        assert_int_equal(end_of(pid), 0);
    }
    program_close(open_client(&s->agents[0]));
}

/* ---- Stopped --------------------------------------------------------------------------------------------------- */

/* An agent that does not answer is told from one that is not there, and a batch that it may have is given up later. */
static void test_silent(void **state) {
    const two_agents *s = *state;
    program *c = open_client(&s->agents[0]), *other = NULL;
    tb_world_opts opts = {.size = sizeof opts, .timeout_ms = 300};
    stop_agent(&s->agents[0]);
    int64_t begun_ms = tb__now_ms();
    assert_fails(program_connect(s->agents[0].path, &opts, &other), TB_TIMEOUT, "is silent");
    assert_true(tb__now_ms() - begun_ms >= 300);
    assert_int_equal(kill(s->agents[0].pid, SIGCONT), 0);
    assert_ok(program_connect(s->agents[0].path, NULL, &other));
    program_close(other);
    program_close(c);
}

/* The first agent sends what nobody receives, and is told to stop; it has begun to when it tells its other client so.
 * Returns when it was told. */
static int64_t begin_to_stop(const two_agents *s, call calls[2], program *other) {
    static uint8_t data[2][64];
    program_transfer_opts opts = {.timeout_ms = PATIENCE_MS, .no_wait = true};
    move_in(s, calls, (void *const[]){data[0], data[1]}, sizeof *data);
    assert_ok(program_transfer(calls[0].batch, true, &opts));
    int64_t begun_ms = tb__now_ms();
    assert_int_equal(kill(s->agents[0].pid, SIGTERM), 0);
    while (program_pair(other, "q", two_groups[1], "mesh=1 place=R", 10) == TB_TIMEOUT)
        assert_true(tb__now_ms() - begun_ms < PATIENCE_MS / 2);
    assert_non_null(strstr(tb_error_detail(), "the agent is stopping"));
    return begun_ms;
}

/* The first signal lets a transfer end, for which nobody is there; the second cuts it off. */
static void test_stopped_twice(void **state) {
    two_agents *s = *state;
    call calls[2] = {{0}};
    program *other = open_client(&s->agents[0]);
    program_status status = {0};
    int64_t begun_ms = begin_to_stop(s, calls, other);
    assert_ok(program_query(calls[0].batch, &status));
    assert_string_equal(status.state, "sending");
    assert_fails(program_wait(calls[0].batch, true, TB_COMMITTED, 20), TB_TIMEOUT, "after 20 ms");
    end_agent(&s->agents[0], SIGTERM);
    assert_true(tb__now_ms() - begun_ms < PATIENCE_MS / 2);
    assert_fails(program_wait(calls[0].batch, true, TB_COMMITTED, -1), TB_LOST, "is gone");
    program_close(other);
    move_out(calls);
}

/* What an agent that stops would wait for is given up, and it is gone. */
static void test_stopped_and_cleaned(void **state) {
    two_agents *s = *state;
    call calls[2] = {{0}};
    program *other = open_client(&s->agents[0]);
    int64_t begun_ms = begin_to_stop(s, calls, other);
    assert_ok(program_cleanup(calls[0].batch));
    end_agent(&s->agents[0], 0);
    assert_true(tb__now_ms() - begun_ms < PATIENCE_MS / 2);
    program_close(other);
    move_out(calls);
}

static int raw_connect(const char *path) {
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    snprintf(name.sun_path, sizeof name.sun_path, "%s", path);
    assert_int_equal(connect(fd, (const struct sockaddr *)&name, sizeof name), 0);
    return fd;
}

static void raw_send(int fd, const tb__message *message, int memory) {
    tb__bytes frame = {0};
    union {
        char bytes[CMSG_SPACE(sizeof(int))];
        struct cmsghdr align;
    } control = {{0}};
    assert_ok(tb__message_encode(message, &frame));
    struct iovec piece = {frame.item, frame.count};
    struct msghdr header = {.msg_iov = &piece, .msg_iovlen = 1};
    if (memory >= 0) {
        header.msg_control = control.bytes;
        header.msg_controllen = sizeof control.bytes;
        *CMSG_FIRSTHDR(&header) =
            (struct cmsghdr){.cmsg_len = CMSG_LEN(sizeof memory), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
        memcpy(CMSG_DATA(CMSG_FIRSTHDR(&header)), &memory, sizeof memory);
    }
    assert_int_equal(sendmsg(fd, &header, MSG_NOSIGNAL), (ssize_t)frame.count);
    free(frame.item);
}

/* Frames that the agent reads all at once: the descriptor belongs to the one that it came with. */
static void test_pipeline(void **state) {
    const two_agents *s = *state;
    void *data;
    call calls[2] = {0};
    assert_ok(tb_alloc(64, &data));
    move_in(s, calls, (void *const[]){data, data}, 4);
    int fd = raw_connect(s->agents[0].path);
    int memory = eventfd(0, EFD_CLOEXEC); /* not a file: that is what is refused */
    assert_true(memory >= 0);
    tb__tensor_payload p = {.name = "w", .dtype = TB_U32, .data = {.kind = TB__MEMORY_FD, .nbytes = sizeof(uint32_t)}};
    tb__bytes payload = {0};
    assert_ok(tb__tensor_encode(&p, NULL, &payload));
    tb__entry entry = {.pair_name = "p", .payload = {payload.item, payload.count}};
    tb__message hello = {.kind = TB__HELLO, .protocol = TB__PROTOCOL_VERSION, .client = "raw"};
    tb__message query = {.kind = TB__QUERY_STATUS, .batch_id = "none"};
    tb__message add = {.kind = TB__REGISTER_TENSORS, .batch_id = "other", .tensors = {1, &entry}};
    stop_agent(&s->agents[0]);
    raw_send(fd, &hello, -1);
    raw_send(fd, &query, -1);
    raw_send(fd, &add, memory);
    raw_send(fd, &query, -1);
    assert_int_equal(kill(s->agents[0].pid, SIGCONT), 0);
    tb__frame_reader in = {0};
    tb__arena arena = {0};
    for (int nreplies = 0; nreplies < 4;) {
        tb__blob map;
        bool has_frame;
        assert_ok(tb__frame_next(&in, &map, &has_frame));
        if (has_frame) {
            tb__message reply;
            assert_ok(tb__message_decode(map, &arena, &reply));
            nreplies++;
            if (reply.seq == 2 && !strstr(reply.message, "not that of a file"))
                fail_msg("%s", reply.message);
            continue;
        }
        uint8_t *room;
        size_t nbytes;
        struct pollfd readable = {.fd = fd, .events = POLLIN};
        assert_int_equal(poll(&readable, 1, PATIENCE_MS), 1);
        assert_ok(tb__frame_room(&in, &room, &nbytes));
        ssize_t n = recv(fd, room, nbytes, 0);
        assert_true(n > 0);
        tb__frame_filled(&in, (size_t)n);
    }
    tb__frame_reader_fini(&in);
    tb__arena_fini(&arena);
    free(payload.item);
    close(memory);
    close(fd);
    move_out(calls);
    tb_free(data);
}

/* Seconds of processor time that a process has had. */
static double seconds_of(pid_t pid) {
    char path[64], line[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    FILE *file = fopen(path, "re");
    assert_non_null(file);
    assert_non_null(fgets(line, sizeof line, file));
    fclose(file);
    char *at = strrchr(line, ')');
    for (int field = 2; at && field < 14; field++)
        at = strchr(at + 1, ' ');
    assert_non_null(at);
    unsigned long user = strtoul(at, &at, 10), system = strtoul(at, NULL, 10);
    return (double)(user + system) / (double)sysconf(_SC_CLK_TCK);
}

/* Without descriptors left: the next program hears so, and whose limit it is; the agent does not spin, and all is well
 * when some are closed. */
static void test_no_files(void **state) {
    const two_agents *s = *state;
    enum { ROOM = 12 };
    pid_t pid = s->agents[0].pid;
    struct rlimit before, few;
    program *clients[ROOM] = {0}, *c = NULL;
    int fds[ROOM], nclients = 0;
    char words[128];
    tb_world_opts opts = {.size = sizeof opts, .timeout_ms = PATIENCE_MS};
    assert_int_equal(prlimit(pid, RLIMIT_NOFILE, NULL, &before), 0);
    few = (struct rlimit){(rlim_t)count_files(pid) + ROOM, before.rlim_max};
    assert_int_equal(prlimit(pid, RLIMIT_NOFILE, &few, NULL), 0);
    tb_status status = TB_OK;
    while (nclients < ROOM && (status = program_connect(s->agents[0].path, &opts, &clients[nclients])) == TB_OK)
        nclients++;
    snprintf(words, sizeof words, "process %d is out of file descriptors, its RLIMIT_NOFILE is %d", (int)pid,
             (int)few.rlim_cur);
    assert_fails(status, TB_IO, words);
    for (int i = 0; i < ROOM; i++) /* they say nothing */
        fds[i] = raw_connect(s->agents[0].path);
    double used = seconds_of(pid);
    sleep(1);
    assert_true(seconds_of(pid) - used < 0.5);
    for (int i = 0; i < ROOM; i++)
        close(fds[i]);
    for (int i = 0; i < nclients; i++)
        program_close(clients[i]);
    int64_t deadline_ms = tb__now_ms() + PATIENCE_MS; /* it hears of those who went later than of those who come */
    while ((status = program_connect(s->agents[0].path, &opts, &c)) != TB_OK && tb__now_ms() < deadline_ms)
        usleep(1000);
    assert_ok(status);
    program_close(c);
    assert_int_equal(prlimit(pid, RLIMIT_NOFILE, &before, NULL), 0);
}

/* ---- Killed ---------------------------------------------------------------------------------------------------- */

/* Every call that waits returns, on both sides; then another agent takes the seat, and all can be made again. */
static void test_agent_dies(void **state) {
    two_agents *s = *state;
    void *data[2];
    for (int i = 0; i < 2; i++)
        assert_ok(tb_alloc(4096, &data[i]));
    for (int what = INIT; what <= TRANSFER; what++) {
        call calls[2] = {0};
        memset(data[0], 10 + what, 4096);
        if (what == INIT) {
            calls[1] = (call){.client = open_client(&s->agents[1]), .side = 1};
        } else {
            move_in(s, calls, data, 4096);
            if (what == REGISTER) {
                tb_tensor t = {.size = sizeof t, .data = data[1], .dtype = TB_U8, .ndim = 1, .shape = {4096}};
                program_batch_destroy(calls[1].batch);
                assert_ok(program_batch_create(calls[1].client, "step", NULL, &calls[1].batch));
                assert_ok(program_add(calls[1].batch, "p", "w", &t));
            }
        }
        /* b waits for what a does not do; its own agent dies. */
        call *waiting = &calls[1];
        begin_call(waiting, what);
        usleep(100000);
        int64_t killed_ms = tb__now_ms();
        end_agent(&s->agents[1], SIGKILL);
        end_call(waiting);
        assert_int_equal(waiting->status, TB_LOST);
        assert_non_null(strstr(waiting->why, "is gone"));
        assert_true(waiting->ended_ms - killed_ms < NOTICE_MS);
        if (what != INIT) { /* and the other side hears of it */
            begin_call(&calls[0], TRANSFER);
            end_call(&calls[0]);
            assert_true(calls[0].status != TB_OK);
            assert_true(calls[0].ended_ms - killed_ms < NOTICE_MS);
        }
        program_batch_destroy(calls[1].batch);
        program_close(calls[1].client);
        program_batch_destroy(calls[0].batch);
        begin_agent(&s->agents[1], s->folder, "b", 0, 1, "30");
        await_agent(&s->agents[1]);
        /* a's client is the one it was. */
        calls[0].batch = NULL;
        calls[1] = (call){.client = open_client(&s->agents[1]), .side = 1};
        if (!calls[0].client)
            calls[0] = (call){.client = open_client(&s->agents[0])};
        move_in(s, calls, data, 4096);
        memset(data[1], 0, 4096);
        call_both(calls, TRANSFER);
        assert_memory_equal(data[0], data[1], 4096);
        move_out(calls);
    }
    for (int i = 0; i < 2; i++)
        tb_free(data[i]);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_memory, begin_two, end_two),
        cmocka_unit_test_setup_teardown(test_other_user, begin_two, end_two),
        cmocka_unit_test_setup_teardown(test_silent, begin_two, end_two),
        cmocka_unit_test_setup_teardown(test_stopped_twice, begin_two, end_two),
        cmocka_unit_test_setup_teardown(test_stopped_and_cleaned, begin_two, end_two),
        cmocka_unit_test_setup_teardown(test_pipeline, begin_two, end_two),
        cmocka_unit_test_setup_teardown(test_no_files, begin_two, end_two),
        cmocka_unit_test_setup_teardown(test_agent_dies, begin_two, end_two),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
