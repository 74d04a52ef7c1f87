/* Files that belong to a model beside its tensors: config.json, the tokenizer, ... */
#include "format/file.h"
#include "tools/model.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static bool ends_with(const char *name, const char *tail) {
    size_t n = strlen(name), k = strlen(tail);
    return n >= k && strcmp(name + n - k, tail) == 0;
}

/* Neither hidden nor weights, of whatever format. */
static bool is_companion(const char *name) {
    static const char *const weights[] = {".safetensors", ".index.json", ".bin",  ".pt",   ".pth",
                                          ".gguf",        ".h5",         ".onnx", ".ckpt", ".msgpack"};
    for (size_t i = 0; i < sizeof weights / sizeof *weights; i++) {
        if (ends_with(name, weights[i]))
            return false;
    }
    return name[0] != '.';
}

static tb_status copy_bytes(int in, const char *from, int out, const char *to) {
    char buffer[1 << 16];
    for (;;) {
        ssize_t n = read(in, buffer, sizeof buffer);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return tb__file_fail_errno(TB_IO, from, "can't be read");
        if (n == 0)
            return TB_OK;
        for (ssize_t done = 0; done < n;) {
            ssize_t written = write(out, buffer + done, (size_t)(n - done));
            if (written < 0 && errno != EINTR)
                return tb__file_fail_errno(TB_IO, to, "can't be written");
            done += written > 0 ? written : 0;
        }
    }
}

/* It has its name when it is complete, and no file of that name is replaced. */
static tb_status copy_file(const char *from, const char *to, const char *temporary) {
    int in = open(from, O_RDONLY | O_CLOEXEC);
    if (in < 0)
        return tb__file_fail_errno(TB_IO, from, "can't be opened");
    int out = open(temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    tb_status status = out < 0 ? tb__file_fail_errno(TB_IO, temporary, "can't be made") : TB_OK;
    if (status == TB_OK)
        status = copy_bytes(in, from, out, temporary);
    close(in);
    if (out >= 0 && close(out) != 0 && status == TB_OK)
        status = tb__file_fail_errno(TB_IO, temporary, "can't be written");
    if (status == TB_OK && link(temporary, to) != 0 && errno != EEXIST)
        status = tb__file_fail_errno(TB_IO, to, "can't be made");
    if (out >= 0)
        unlink(temporary);
    return status;
}

static tb_status copy_one(const char *from, const char *to, const char *name) {
    char *source, *target = NULL, *temporary = NULL, hidden[300];
    struct stat about;
    TB_TRY(tb__file_join(from, name, &source));
    snprintf(hidden, sizeof hidden, ".%s.%d.tmp", name, (int)getpid());
    tb_status status = tb__file_join(to, name, &target);
    if (status == TB_OK)
        status = tb__file_join(to, hidden, &temporary);
    if (status == TB_OK && stat(source, &about) == 0 && S_ISREG(about.st_mode) && access(target, F_OK) != 0)
        status = copy_file(source, target, temporary);
    free(source);
    free(target);
    free(temporary);
    return status;
}

tb_status tool_copy_companions(const char *from, const char *to) {
    struct stat about;
    if (stat(from, &about) == 0 && !S_ISDIR(about.st_mode))
        return TB_OK;
    DIR *stream = opendir(from);
    if (!stream)
        return tb__file_fail_errno(TB_IO, from, "can't be listed");
    tb_status status = TB_OK;
    const struct dirent *e;
    while (status == TB_OK && (e = readdir(stream))) {
        if (is_companion(e->d_name))
            status = copy_one(from, to, e->d_name);
    }
    closedir(stream);
    return status;
}
