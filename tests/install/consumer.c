/* A first program of a user: it calls the library and prints the version. */
#include <stdio.h>

#include <tensorbus/plan.h>
#include <tensorbus/tensorbus.h>
#include <tensorbus/transport.h>

int main(void) {
    tb_layout *layout;
    if (tb_layout_parse("mesh=2 place=S0", &layout) != TB_OK) {
        fprintf(stderr, "%s\n", tb_error_detail());
        return 1;
    }
    tb_layout_destroy(layout);
    printf("%s\n", tb_version_string());
    return 0;
}
