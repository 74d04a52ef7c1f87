# The library for each MPI that is found: its ABI is its own, so there is one for Open MPI and one for MPICH, each with
# its tests, its example and its benchmark.

set(transport_mpi_sources
    src/transport/mpi/mpi_request.c
    src/transport/mpi/mpi_chunk.c
    src/transport/mpi/mpi_frame.c
    src/transport/mpi/mpi_message.c
    src/transport/mpi/mpi_end.c
    src/transport/mpi/mpi.c
)
set(bus_mpi_sources
    src/bus/mpi/bootstrap.c
    src/bus/mpi/mpi_world.c
)

# tb_mpi(name module launcher...): tensorbus-mpi-name, built with what pkg-config calls `module`; `launcher...` starts
# four ranks.
function(tb_mpi name module)
    pkg_check_modules(mpi_${name} QUIET IMPORTED_TARGET ${module})
    list(POP_FRONT ARGN program)
    find_program(mpi_launcher_${name} ${program})
    if(NOT mpi_${name}_FOUND OR NOT mpi_launcher_${name})
        return()
    endif()
    set(found_mpis ${found_mpis} ${name} PARENT_SCOPE)
    set(launch_${name} ${mpi_launcher_${name}} ${ARGN} PARENT_SCOPE)
    foreach(folder IN ITEMS transport bus)
        set(objects ${folder}_mpi_${name}_objects)
        tb_objects(${objects} USES ${folder} SOURCES ${${folder}_mpi_sources})
        target_link_libraries(${objects} PRIVATE PkgConfig::mpi_${name})
        list(APPEND mpi_objects $<TARGET_OBJECTS:${objects}>)
    endforeach()

    add_library(tensorbus_mpi_${name}_shared SHARED ${mpi_objects})
    add_library(tensorbus_mpi_${name}_static STATIC ${mpi_objects})
    get_target_property(soversion tensorbus_shared SOVERSION)
    set_target_properties(tensorbus_mpi_${name}_shared PROPERTIES SOVERSION ${soversion} VERSION ${PROJECT_VERSION})
    if(NOT TB_SANITIZE)
        target_link_options(tensorbus_mpi_${name}_shared PRIVATE LINKER:-z,defs)
    endif()
    foreach(kind IN ITEMS shared static)
        set_target_properties(tensorbus_mpi_${name}_${kind} PROPERTIES OUTPUT_NAME tensorbus-mpi-${name})
        target_link_libraries(tensorbus_mpi_${name}_${kind} PUBLIC tensorbus_${kind} PkgConfig::mpi_${name})
    endforeach()
    install(TARGETS tensorbus_mpi_${name}_static)
    # Of the shared library alone there is a target for find_package, as a component that makes its user find the MPI.
    set_target_properties(tensorbus_mpi_${name}_shared PROPERTIES EXPORT_NAME mpi_${name})
    install(TARGETS tensorbus_mpi_${name}_shared EXPORT tensorbus-mpi-${name})
    install(EXPORT tensorbus-mpi-${name} NAMESPACE tensorbus:: DESTINATION ${package_dir})
    set(mpi_name ${name})
    set(mpi_module ${module})
    configure_file(cmake/tensorbus-mpi.pc.in ${PROJECT_BINARY_DIR}/cmake/tensorbus-mpi-${name}.pc @ONLY)
    install(
        FILES ${PROJECT_BINARY_DIR}/cmake/tensorbus-mpi-${name}.pc
        DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig
    )
endfunction()

# tb_mpi_test(transport/mpi/mpi_test [TIMEOUT seconds] [SOURCES file...] [CASES word...]): src/transport/mpi/mpi_test.c,
# run with four ranks of each MPI, once for each word, which is its argument.
function(tb_mpi_test name)
    cmake_parse_arguments(PARSE_ARGV 1 arg "" "TIMEOUT" "SOURCES;CASES")
    if(NOT arg_TIMEOUT)
        set(arg_TIMEOUT 120)
    endif()
    foreach(mpi IN LISTS found_mpis)
        string(REPLACE "/" "_" target ${name}_${mpi})
        tb_program(${target} src/${name}.c tests/${name}_${mpi})
        target_sources(${target} PRIVATE ${arg_SOURCES})
        target_link_libraries(${target} PRIVATE tensorbus_mpi_${mpi}_static PkgConfig::cmocka)
        tb_show_internals(${target})
        if(NOT arg_CASES)
            add_test(NAME ${name}_${mpi} COMMAND ${launch_${mpi}} $<TARGET_FILE:${target}>)
            set_tests_properties(${name}_${mpi} PROPERTIES TIMEOUT ${arg_TIMEOUT} ENVIRONMENT "${mpi_environment}")
        endif()
        foreach(case IN LISTS arg_CASES)
            set(test ${name}_${mpi}_${case})
            add_test(NAME ${test} COMMAND ${launch_${mpi}} $<TARGET_FILE:${target}> ${case})
            set_tests_properties(${test} PROPERTIES TIMEOUT ${arg_TIMEOUT} ENVIRONMENT "${mpi_environment}")
        endforeach()
    endforeach()
endfunction()

# tb_mpi_program(bench bench name), tb_mpi_program(example examples name): bench/name.c, examples/name.c, with each MPI.
function(tb_mpi_program kind folder name)
    foreach(mpi IN LISTS found_mpis)
        tb_program(${kind}_${name}_${mpi} ${folder}/${name}.c ${folder}/${name}_${mpi})
        target_link_libraries(${kind}_${name}_${mpi} PRIVATE tensorbus_mpi_${mpi}_static)
    endforeach()
endfunction()

option(TB_MPI "Build the libraries for those MPIs that are found" ON)
set(found_mpis)
if(TB_MPI)
    tb_mpi(openmpi ompi-c mpirun.openmpi --oversubscribe -n 4)
    tb_mpi(mpich mpich mpiexec.mpich -n 4)
endif()

# Open MPI wants to be asked twice before it runs as root, as in a container. MPIs leak a little at their end, from plugins
# that are unloaded by then and can't be named; and they are not built with ThreadSanitizer, which so misses their locks.
set(mpi_environment
    OMPI_ALLOW_RUN_AS_ROOT=1
    OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    ASAN_OPTIONS=detect_leaks=0
    TSAN_OPTIONS=ignore_noninstrumented_modules=1
)
if(TB_SANITIZE MATCHES thread)
    # CMakeLists.txt says why. MPICH uses UCX, and worlds of several hosts open it.
    list(APPEND mpi_environment UCX_MEM_EVENTS=n)
endif()
