/* A first program of a user: it calls the library and prints the version. */
#include <stdio.h>

#include <tensorbus/tensorbus.h>

int main(void) {
    printf("%s\n", tb_version_string());
    return 0;
}
