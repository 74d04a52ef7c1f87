# How every file of the project is compiled, all of them C but one of a test's. gcc and clang know every flag here, so that one
# compile_commands.json serves the compiler and clang-tidy alike.

set(CMAKE_C_STANDARD 17)
set(CMAKE_C_STANDARD_REQUIRED ON)
set(CMAKE_C_EXTENSIONS OFF)
set(CMAKE_C_VISIBILITY_PRESET hidden)

# Strict C17 hides POSIX and Linux declarations unless they are asked for.
add_compile_definitions(_GNU_SOURCE)

add_compile_options(
    -Wall
    -Wextra
    -Wpedantic
    -Wconversion
    -Wno-sign-conversion
    -Wformat=2
    -Wpointer-arith
    -Wshadow
    -Wundef
    -Wvla
    -Wwrite-strings
    "$<$<COMPILE_LANGUAGE:C>:-Wmissing-prototypes;-Wold-style-definition;-Wstrict-prototypes>"
    # Results must be the same bits on every path, including those that may use fused multiply-add.
    -ffp-contract=off
    # Equal sources give equal objects, wherever the clone is.
    -ffile-prefix-map=${CMAKE_SOURCE_DIR}=.
)
if(TB_WERROR)
    add_compile_options(-Werror)
endif()

if(TB_SANITIZE)
    add_compile_options(-fsanitize=${TB_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
    add_link_options(-fsanitize=${TB_SANITIZE})
endif()
