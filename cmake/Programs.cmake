# The programs beside the tool: tests, benchmarks, examples, fuzz targets.

# tb_program(target source output): an executable linked to the static library; output is its path
# under the build folder.
function(tb_program target source output)
    cmake_path(GET output PARENT_PATH folder)
    cmake_path(GET output FILENAME name)
    add_executable(${target} ${source})
    set_target_properties(${target} PROPERTIES
        OUTPUT_NAME ${name}
        RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/${folder}
    )
    target_link_libraries(${target} PRIVATE tensorbus_static)
endfunction()

# tb_show_internals(target): lets a program include the library's own headers, and what they include.
function(tb_show_internals target)
    target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR}/src)
    target_link_libraries(${target} PRIVATE ${library_dependencies})
endfunction()

# tb_test(layout/mesh_test [TIMEOUT seconds] [SOURCES file...]): src/layout/mesh_test.c, a cmocka
# test. SOURCES are files that several tests share.
function(tb_test name)
    cmake_parse_arguments(PARSE_ARGV 1 arg "" "TIMEOUT" "SOURCES")
    if(NOT arg_TIMEOUT)
        set(arg_TIMEOUT 120)
    endif()
    string(REPLACE "/" "_" target ${name})
    tb_program(${target} src/${name}.c tests/${name})
    target_sources(${target} PRIVATE ${arg_SOURCES})
    target_link_libraries(${target} PRIVATE PkgConfig::cmocka)
    tb_show_internals(${target})
    add_test(NAME ${name} COMMAND ${target})
    set_tests_properties(${name} PROPERTIES
        TIMEOUT ${arg_TIMEOUT}
        ENVIRONMENT "TB_GOLDEN=${PROJECT_SOURCE_DIR}/tests/golden"
    )
endfunction()

# tb_slow_test(bus/cancel_test [NO_CUDA] [TIMEOUT seconds] [SOURCES file...]): that test again, with tensors on the
# slow device, with some of them there, and, without NO_CUDA, on a GPU, for which the fake driver stands in.
function(tb_slow_test name)
    cmake_parse_arguments(PARSE_ARGV 1 arg "NO_CUDA" "TIMEOUT" "SOURCES")
    if(NOT arg_TIMEOUT)
        set(arg_TIMEOUT 300)
    endif()
    string(REPLACE "/" "_" target ${name}_slow)
    tb_program(${target} src/${name}.c tests/${name}_slow)
    target_sources(${target} PRIVATE ${slow_device} tests/support/random_case.c ${arg_SOURCES})
    target_compile_definitions(${target} PRIVATE TB_SLOW_DEVICE)
    target_link_libraries(${target} PRIVATE PkgConfig::cmocka)
    tb_show_internals(${target})
    set(devices slow mixed)
    if(cuda_sources AND NOT arg_NO_CUDA)
        tb_cuda_tensors(${target})
        list(APPEND devices cuda)
        foreach(device IN ITEMS cuda cuda_mixed)
            tb_pack_test(${name}_${device} ${target} ${arg_TIMEOUT} TB_TEST_DEVICE=${device})
        endforeach()
    endif()
    foreach(device IN LISTS devices)
        add_test(NAME ${name}_${device} COMMAND ${target})
        set(environment TB_TEST_DEVICE=${device})
        if(device STREQUAL "cuda")
            list(APPEND environment LD_LIBRARY_PATH=${PROJECT_BINARY_DIR}/tests/fake_cuda)
        endif()
        set_tests_properties(${name}_${device} PROPERTIES TIMEOUT ${arg_TIMEOUT} ENVIRONMENT "${environment}")
        if(device STREQUAL "cuda")
            set_tests_properties(${name}_${device} PROPERTIES LABELS gpu)
        endif()
    endforeach()
endfunction()

# tb_pack_test(name target seconds [VARIABLE=VALUE...]): `./dev gpu` packs the test, which runs on a GPU, and may take so
# long.
function(tb_pack_test name target seconds)
    get_target_property(folder ${target} RUNTIME_OUTPUT_DIRECTORY)
    get_target_property(file ${target} OUTPUT_NAME)
    file(RELATIVE_PATH program ${PROJECT_BINARY_DIR}/tests ${folder}/${file})
    string(REPLACE ";" " " line "${name};${seconds};${program};${ARGN}")
    set_property(GLOBAL APPEND PROPERTY gpu_tests ${line})
    set_property(GLOBAL APPEND PROPERTY gpu_targets ${target})
endfunction()

# tb_gpu_programs(pattern...): the target that builds all of these, and their list, gpu_tests; and a test that packs them
# and runs those that match a pattern on the fake driver.
function(tb_gpu_programs)
    get_property(tests GLOBAL PROPERTY gpu_tests)
    get_property(targets GLOBAL PROPERTY gpu_targets)
    list(REMOVE_DUPLICATES targets)
    string(REPLACE ";" "\n" tests "${tests}")
    file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/gpu_tests CONTENT "@tests@\n" @ONLY)
    add_custom_target(gpu_programs DEPENDS tensorbus ${targets})
    if(tests AND NOT TB_SANITIZE)
        add_test(NAME gpu/pack COMMAND sh ${PROJECT_SOURCE_DIR}/tests/gpu/pack_test.sh ${ARGN})
        set_tests_properties(gpu/pack PROPERTIES TIMEOUT 300 ENVIRONMENT "BUILD=${PROJECT_BINARY_DIR}" LABELS gpu)
    endif()
endfunction()

# tb_security_test(name [SOURCES file...]): tests/security/name.c, a cmocka test; exit status 77 is a skip.
function(tb_security_test name)
    cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "SOURCES")
    tb_program(security_${name} tests/security/${name}.c tests/security/${name})
    target_sources(security_${name} PRIVATE ${arg_SOURCES})
    target_link_libraries(security_${name} PRIVATE PkgConfig::cmocka)
    tb_show_internals(security_${name})
    add_test(NAME security/${name} COMMAND security_${name})
    set_tests_properties(security/${name} PROPERTIES TIMEOUT 120 SKIP_RETURN_CODE 77 LABELS security)
endfunction()

# tb_etcd_test(bus/store/store_test [TIMEOUT seconds]): runs that test's program once more, with an etcd
# that it starts; exit status 77 is a skip.
function(tb_etcd_test name)
    cmake_parse_arguments(PARSE_ARGV 1 arg "" "TIMEOUT" "")
    if(NOT arg_TIMEOUT)
        set(arg_TIMEOUT 120)
    endif()
    string(REPLACE "/" "_" target ${name})
    add_test(NAME ${name}_etcd COMMAND ${target} etcd)
    set_tests_properties(${name}_etcd PROPERTIES TIMEOUT ${arg_TIMEOUT} SKIP_RETURN_CODE 77 LABELS etcd)
endfunction()

# tb_agent_test(bus/agent/fault_test ...): a test, as above, that starts agents: the tool is in $TENSORBUS.
function(tb_agent_test name)
    tb_test(${name} ${ARGN})
    string(REPLACE "/" "_" target ${name})
    add_dependencies(${target} tensorbus)
    set_tests_properties(${name} PROPERTIES
        ENVIRONMENT "TB_GOLDEN=${PROJECT_SOURCE_DIR}/tests/golden;TENSORBUS=$<TARGET_FILE:tensorbus>"
    )
endfunction()

# tb_cli_test(name [TIMEOUT seconds]): tests/cli/name.sh, which finds the tool in $TENSORBUS, and in
# $SANITIZED what it was compiled with, in $MPIS the MPIs that it was built with, and, if it has the CUDA device, in
# $FAKE_UCX, $FAKE_NCCL, $FAKE_NVSHMEM and $FAKE_CUDA the fake UCX, NCCL and NVSHMEM and the folder of the fake driver;
# exit status 77 is a skip.
function(tb_cli_test name)
    cmake_parse_arguments(PARSE_ARGV 1 arg "" "TIMEOUT" "")
    if(NOT arg_TIMEOUT)
        set(arg_TIMEOUT 120)
    endif()
    add_test(NAME cli/${name} COMMAND sh ${PROJECT_SOURCE_DIR}/tests/cli/${name}.sh)
    set(environment
        "TB_GOLDEN=${PROJECT_SOURCE_DIR}/tests/golden"
        "TENSORBUS=$<TARGET_FILE:tensorbus>"
        "SANITIZED=${TB_SANITIZE}"
        "MPIS=${built_mpis}"
    )
    if(TARGET fake_cuda)
        list(APPEND environment "FAKE_CUDA=${PROJECT_BINARY_DIR}/tests/fake_cuda" "FAKE_UCX=$<TARGET_FILE:fake_ucx>"
            "FAKE_NCCL=${PROJECT_BINARY_DIR}/tests/fake_nccl/libnccl.so.2" "FAKE_NVSHMEM=$<TARGET_FILE:fake_nvshmem>")
    endif()
    set_tests_properties(cli/${name} PROPERTIES
        TIMEOUT ${arg_TIMEOUT}
        SKIP_RETURN_CODE 77
        ENVIRONMENT "${environment}"
    )
endfunction()

# tb_api_programs(): tests/api/program.c, which has the public headers only, and, with the first MPI that is found, once
# more for ranks of MPI.
function(tb_api_programs)
    tb_program(api_program tests/api/program.c tests/api/program)
    set(api_environment TENSORBUS=$<TARGET_FILE:tensorbus> TB_PROGRAM=$<TARGET_FILE:api_program>)
    if(found_mpis)
        list(GET found_mpis 0 mpi)
        tb_program(api_program_mpi tests/api/program.c tests/api/program_mpi)
        target_compile_definitions(api_program_mpi PRIVATE TB_PROGRAM_MPI)
        target_link_libraries(api_program_mpi PRIVATE tensorbus_mpi_${mpi}_static)
        string(REPLACE ";" " " launcher "${launch_${mpi}}")
        list(APPEND api_environment
            "TB_MPI_LAUNCHER=${launcher}" TB_PROGRAM_MPI=$<TARGET_FILE:api_program_mpi>
        )
        string(REPLACE ";" " " variables "${mpi_environment}")
        list(APPEND api_environment "TB_MPI_ENVIRONMENT=${variables}")
    endif()
    set(api_environment ${api_environment} PARENT_SCOPE)
endfunction()

# tb_api_test(name [TIMEOUT seconds]): tests/api/name.py, which finds the tool in $TENSORBUS, and in $TB_PROGRAM the
# program that it drives; exit status 77 is a skip.
function(tb_api_test name)
    cmake_parse_arguments(PARSE_ARGV 1 arg "" "TIMEOUT" "")
    if(NOT arg_TIMEOUT)
        set(arg_TIMEOUT 300)
    endif()
    add_test(NAME api/${name} COMMAND python3 -B ${PROJECT_SOURCE_DIR}/tests/api/${name}.py)
    set(api_environment ${api_environment} TB_BUILD=${PROJECT_BINARY_DIR} CC=${CMAKE_C_COMPILER})
    set_tests_properties(api/${name} PROPERTIES
        TIMEOUT ${arg_TIMEOUT}
        SKIP_RETURN_CODE 77
        LABELS api
        ENVIRONMENT "${api_environment};${ucx_environment}"
    )
endfunction()

# tb_python_test(name [TIMEOUT seconds] [ARG...]): python/tests/name.py, or the docstrings of the package, by the
# environment that ./dev makes; exit status 77 is a skip.
function(tb_python_test name)
    cmake_parse_arguments(PARSE_ARGV 1 arg "" "TIMEOUT" "")
    if(NOT arg_TIMEOUT)
        set(arg_TIMEOUT 300)
    endif()
    add_test(NAME python/${name} COMMAND sh ${PROJECT_SOURCE_DIR}/python/tests/run.sh ${name})
    set_tests_properties(python/${name} PROPERTIES
        TIMEOUT ${arg_TIMEOUT}
        SKIP_RETURN_CODE 77
        LABELS python
        ENVIRONMENT "TENSORBUS_LIBRARY=$<TARGET_FILE:tensorbus_shared>;CC=${CMAKE_C_COMPILER}"
    )
endfunction()

# tb_hosts_test(name hosts [TIMEOUT seconds] COMMAND command...): a command with so many hosts around it, for which
# tests/hosts/bed makes network namespaces; exit status 77 is a skip.
function(tb_hosts_test name hosts)
    cmake_parse_arguments(PARSE_ARGV 2 arg "" "TIMEOUT" "COMMAND")
    if(NOT arg_TIMEOUT)
        set(arg_TIMEOUT 120)
    endif()
    add_test(NAME hosts/${name} COMMAND ${PROJECT_SOURCE_DIR}/tests/hosts/bed ${hosts} -- ${arg_COMMAND})
    set_tests_properties(hosts/${name} PROPERTIES
        TIMEOUT ${arg_TIMEOUT} SKIP_RETURN_CODE 77 ENVIRONMENT "${ucx_environment}" LABELS "hosts;root"
    )
endfunction()

# tb_install_test(): installs this build into a temporary prefix, then builds and runs a program
# against it in each supported way, and one with each MPI.
function(tb_install_test)
    string(REPLACE ";" " " mpis "${found_mpis}")
    add_test(NAME install COMMAND sh ${PROJECT_SOURCE_DIR}/tests/install/run.sh)
    set(environment
        "BUILD=${PROJECT_BINARY_DIR}"
        "CC=${CMAKE_C_COMPILER}"
        "CMAKE=${CMAKE_COMMAND}"
        "GENERATOR=${CMAKE_GENERATOR}"
        "LIBDIR=${CMAKE_INSTALL_LIBDIR}"
        "PKG_CONFIG=${PKG_CONFIG_EXECUTABLE}"
        "VERSION=${PROJECT_VERSION}"
        "EXAMPLES=${PROJECT_SOURCE_DIR}/examples"
        "MPIS=${mpis}"
        "${mpi_environment}"
    )
    foreach(mpi IN LISTS found_mpis)
        string(REPLACE ";" " " launch "${launch_${mpi}}")
        list(APPEND environment "LAUNCH_${mpi}=${launch}")
    endforeach()
    set_tests_properties(install PROPERTIES TIMEOUT 120 ENVIRONMENT "${environment}")
endfunction()

# tb_bench(name): bench/name.c
function(tb_bench name)
    tb_program(bench_${name} bench/${name}.c bench/${name})
    tb_show_internals(bench_${name})
endfunction()

# tb_example(name): examples/name.c, which has the public header only, as a user's program would.
function(tb_example name)
    tb_program(example_${name} examples/${name}.c examples/${name})
endfunction()

# tb_fuzz(name): tests/fuzz/name_fuzz.c, a libFuzzer target.
function(tb_fuzz name)
    tb_program(fuzz_${name} tests/fuzz/${name}_fuzz.c fuzzers/${name})
    tb_show_internals(fuzz_${name})
    target_link_options(fuzz_${name} PRIVATE -fsanitize=fuzzer)
    add_dependencies(fuzzers fuzz_${name})
endfunction()
