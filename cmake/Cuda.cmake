# The CUDA device: built where nvcc is found. Its kernels are compiled to one file of machine code for several kinds of
# GPUs (a fatbin), which is embedded in the library; the driver is loaded at run time. So the same library works on
# machines with and without GPUs.
#
# nvcc is searched in the PATH, in the usual folder, and in the packages nvidia-cuda-nvcc of PyPI.

set(TB_CUDA AUTO CACHE STRING "Build the CUDA device: ON, OFF, or AUTO, if nvcc is found")
set_property(CACHE TB_CUDA PROPERTY STRINGS AUTO ON OFF)

option(TB_SHARED_KERNELS "Have the kernels of the CUDA device in a library of their own, once for all programs" OFF)
mark_as_advanced(TB_SHARED_KERNELS)

set(cuda_sources "")
set(cuda_bench "") # files of src/bench that need it
set(cuda_summary "without the CUDA device: TB_CUDA is off")
if(TB_CUDA)
    find_package(Python3 QUIET COMPONENTS Interpreter)
    if(Python3_FOUND AND NOT TB_NVCC)
        execute_process(
            COMMAND ${Python3_EXECUTABLE} -c "import site,glob
for d in site.getsitepackages()+[site.getusersitepackages()]:
    for f in glob.glob(d+'/nvidia/*/bin'): print(f,end=';')"
            OUTPUT_VARIABLE nvcc_hints ERROR_QUIET)
    endif()
    find_program(TB_NVCC nvcc HINTS ${nvcc_hints} /usr/local/cuda/bin)
    if(TB_NVCC)
        file(REAL_PATH ${TB_NVCC} nvcc_path)
        cmake_path(GET nvcc_path PARENT_PATH nvcc_bin)
        find_path(TB_CUDA_INCLUDE cuda.h HINTS ${nvcc_bin}/../include ${nvcc_bin}/../targets/x86_64-linux/include)
    endif()
    if(TB_NVCC AND TB_CUDA_INCLUDE)
        set(cuda_sources
            src/device/cuda/api.c
            src/device/cuda/cuda.c
            src/device/cuda/gpu.c
            src/device/cuda/job.c
            src/device/cuda/job_box.c
            src/device/cuda/job_launch.c
            src/device/cuda/job_matrix.c
            src/device/cuda/job_memory.c
            src/device/cuda/job_relay.c
            src/device/cuda/lanes.c
            src/device/cuda/memory.c
            src/device/cuda/pin.c
            src/device/cuda/program.c
            src/device/cuda/share.c
            src/device/cuda/signal.c
            src/device/cuda/stream.c
            src/device/cuda/wake.c
        )
        set(cuda_bench
            src/bench/bench_driver.c
            src/bench/bench_gpu.c
            src/bench/bench_gpu_latency.c
            src/bench/bench_gpu_carried.c
            src/bench/bench_gpu_lines.c
            src/bench/bench_gpu_torch.c
        )
        set(cuda_summary "with the CUDA device, by ${TB_NVCC}")
    elseif(TB_CUDA STREQUAL "AUTO")
        set(cuda_summary "without the CUDA device: nvcc and cuda.h were not found")
    else()
        message(FATAL_ERROR "TB_CUDA is on, but nvcc and cuda.h were not found")
    endif()
endif()
message(STATUS "tensorbus: ${cuda_summary}")

# The kernels of GPUs that the library knows, and PTX of the last one for those that are newer.
set(cuda_targets 80 90 100)
list(TRANSFORM cuda_targets REPLACE ".+" "-gencode=arch=compute_\\0,code=sm_\\0" OUTPUT_VARIABLE cuda_gencode)
list(APPEND cuda_gencode -gencode=arch=compute_100,code=compute_100)

# tb_cuda_kernels(target): embeds the fatbin in the target's files, or, with TB_SHARED_KERNELS, in a library that is
# added to library_dependencies, with the lines that sanitizers tell.
function(tb_cuda_kernels target)
    file(GLOB kernels CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/device/cuda/kernels/*)
    set(fatbin ${PROJECT_BINARY_DIR}/cuda/kernels.fatbin)
    file(MAKE_DIRECTORY ${PROJECT_BINARY_DIR}/cuda)
    set(lines "")
    set(hidden ".hidden tb__cuda_fatbin\\n")
    if(TB_SHARED_KERNELS)
        set(lines -lineinfo)
        set(hidden "")
    endif()
    # Bits must be those of the host: no fused multiply-add, no approximations. Uncompressed it is ten times as large.
    set(flags -fatbin -O3 -std=c++17 -fmad=false -prec-div=true -prec-sqrt=true -ftz=false ${lines} -Xfatbin=-compress-all
        --threads 2 ${cuda_gencode})
    set(includes -I ${PROJECT_SOURCE_DIR}/src -I ${PROJECT_SOURCE_DIR}/include)
    set(inputs ${kernels} ${PROJECT_SOURCE_DIR}/src/device/cuda/kernels.h)
    cmake_path(GET PROJECT_BINARY_DIR PARENT_PATH cache) # all presets have their folders there
    if(CMAKE_C_COMPILER_LAUNCHER MATCHES "ccache" AND DEFINED ENV{HOME}) # all clones share what is compiled
        set(cache $ENV{HOME}/.cache/tensorbus)
    endif()
    add_custom_command(
        OUTPUT ${fatbin}
        COMMAND ${CMAKE_COMMAND} -D nvcc=${TB_NVCC} "-D flags=${flags}" "-D includes=${includes}"
            "-D inputs=${inputs}" -D source=${PROJECT_SOURCE_DIR}/src/device/cuda/kernels/kernels.cu
            -D cache=${cache}/kernels
            -D fatbin=${fatbin} -P ${PROJECT_SOURCE_DIR}/cmake/Fatbin.cmake
        DEPENDS ${inputs} ${PROJECT_SOURCE_DIR}/cmake/Fatbin.cmake
        COMMENT "Compiling kernels for GPUs"
        VERBATIM)
    set(embedded ${PROJECT_BINARY_DIR}/cuda/kernels.c)
    file(CONFIGURE OUTPUT ${embedded} CONTENT [[
__asm__(".section .rodata\n.balign 64\n.global tb__cuda_fatbin\n@hidden@.type tb__cuda_fatbin, @object\n"
        "tb__cuda_fatbin:\n.incbin \"@fatbin@\"\n.size tb__cuda_fatbin, . - tb__cuda_fatbin\n.previous\n");
typedef int not_empty; /* C allows no file without a declaration */
]] @ONLY)
    set_source_files_properties(${embedded} PROPERTIES OBJECT_DEPENDS ${fatbin})
    if(TB_SHARED_KERNELS)
        add_library(tensorbus_kernels SHARED ${embedded})
        # As if it came from elsewhere: it is not installed.
        add_library(shared_kernels SHARED IMPORTED GLOBAL)
        set_target_properties(shared_kernels PROPERTIES
            IMPORTED_LOCATION ${PROJECT_BINARY_DIR}/libtensorbus_kernels.so
            IMPORTED_SONAME libtensorbus_kernels.so
        )
        add_dependencies(shared_kernels tensorbus_kernels)
        set(library_dependencies ${library_dependencies} shared_kernels PARENT_SCOPE)
    else()
        target_sources(${target} PRIVATE ${embedded})
    endif()
    tb_cuda_headers(${target})
endfunction()

# tb_cuda_headers(target): its files include those of the CUDA device.
function(tb_cuda_headers target)
    target_include_directories(${target} SYSTEM PRIVATE ${TB_CUDA_INCLUDE})
    target_compile_definitions(${target} PRIVATE TB_HAS_CUDA)
endfunction()

# tb_fake_cuda(): a libcuda.so.1 for tests on machines without a GPU (tests/support/fake_cuda/fake_cuda.h), in
# tests/fake_cuda of the build folder. It executes the kernels' source, which is C++, on the CPU; the caller enables
# that language, for which nvcc needs a compiler in any case.
function(tb_fake_cuda)
    add_library(fake_cuda SHARED
        tests/support/fake_cuda/driver.c
        tests/support/fake_cuda/host.c
        tests/support/fake_cuda/kernels.cpp
        tests/support/fake_cuda/memory.c
        tests/support/fake_cuda/pool.c
        tests/support/fake_cuda/stream.c
    )
    set_target_properties(fake_cuda PROPERTIES
        OUTPUT_NAME cuda
        SOVERSION 1
        LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/tests/fake_cuda
        CXX_STANDARD 17
        CXX_VISIBILITY_PRESET hidden
        LINKER_LANGUAGE C # the C++ library is not used
    )
    target_include_directories(fake_cuda PRIVATE ${PROJECT_SOURCE_DIR}/tests/support/fake_cuda)
    target_include_directories(fake_cuda SYSTEM PRIVATE ${TB_CUDA_INCLUDE})
    target_include_directories(fake_cuda PRIVATE ${PROJECT_SOURCE_DIR}/include)
    tb_show_internals(fake_cuda)
    # Sanitizers do not know its stacks. Instead, what a GPU would not do is a trap; of zeros, kernels compute addresses
    # of sources that there are not.
    set(flags -O2 -fno-strict-aliasing -fno-exceptions -fno-sanitize=all -fsanitize=undefined
        -fno-sanitize=pointer-overflow -fsanitize-undefined-trap-on-error
        -Wno-conversion -Wno-pedantic -Wno-shadow -Wno-sign-compare -Wno-unknown-pragmas)
    set_source_files_properties(tests/support/fake_cuda/kernels.cpp PROPERTIES COMPILE_OPTIONS "${flags}")
endfunction()

# tb_fake_ucx(): a UCX that takes memory of the fake driver's GPUs (tests/support/fake_ucx), in tests/fake_ucx of the
# build folder.
function(tb_fake_ucx)
    add_library(fake_ucx SHARED tests/support/fake_ucx/fake_ucx.c)
    set_target_properties(fake_ucx PROPERTIES
        LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/tests/fake_ucx
        C_VISIBILITY_PRESET hidden
    )
    target_include_directories(fake_ucx SYSTEM PRIVATE ${ucx_INCLUDE_DIRS})
    target_link_options(fake_ucx PRIVATE LINKER:--no-as-needed) # most of its functions are found through this one
    target_link_libraries(fake_ucx PRIVATE ${ucx_LINK_LIBRARIES})
endfunction()

# tb_fake_nccl(): a libnccl.so.2 over the fake driver (tests/support/fake_nccl/fake_nccl.h), in tests/fake_nccl of the build
# folder.
function(tb_fake_nccl)
    add_library(fake_nccl SHARED tests/support/fake_nccl/fake_nccl.c)
    set_target_properties(fake_nccl PROPERTIES
        OUTPUT_NAME nccl
        SOVERSION 2
        LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/tests/fake_nccl
        C_VISIBILITY_PRESET hidden
    )
    target_include_directories(fake_nccl SYSTEM PRIVATE ${TB_CUDA_INCLUDE})
    target_include_directories(fake_nccl PRIVATE ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src)
endfunction()

# tb_fake_nvshmem(): an NVSHMEM over the fake driver (tests/support/fake_nvshmem), in tests/fake_nvshmem of the build
# folder.
function(tb_fake_nvshmem)
    add_library(fake_nvshmem SHARED tests/support/fake_nvshmem/fake_nvshmem.c)
    set_target_properties(fake_nvshmem PROPERTIES
        OUTPUT_NAME nvshmem_host
        SOVERSION 3
        LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/tests/fake_nvshmem
        C_VISIBILITY_PRESET hidden
    )
    target_include_directories(fake_nvshmem SYSTEM PRIVATE ${TB_CUDA_INCLUDE})
    target_compile_options(fake_nvshmem PRIVATE -Wno-missing-prototypes) # its functions are declared nowhere
endfunction()

# tb_carried_test(bus/cancel_test ucx [VARIABLE=VALUE...]): what tb_slow_test has built, with tensors on a GPU that go by
# this transport between all ranks.
function(tb_carried_test name transport)
    string(REPLACE "/" "_" target ${name}_slow)
    add_dependencies(${target} fake_${transport})
    add_test(NAME ${name}_cuda_${transport} COMMAND ${target})
    set_tests_properties(${name}_cuda_${transport} PROPERTIES TIMEOUT 600 LABELS gpu
        ENVIRONMENT "TB_TEST_DEVICE=cuda;TB_TRANSPORT=${transport};${fake_${transport}_environment};${ARGN}")
    tb_pack_test(${name}_cuda_${transport} ${target} 600 TB_TEST_DEVICE=cuda TB_TRANSPORT=${transport} ${ARGN})
endfunction()

# tb_cuda_test(device/cuda/memory_test [TIMEOUT seconds] [GPUS n] [SOURCES file...]): a test that runs on the fake
# driver here, and, started by hand, on a real GPU.
function(tb_cuda_test name)
    cmake_parse_arguments(PARSE_ARGV 1 arg "" "TIMEOUT;GPUS" "SOURCES")
    if(NOT arg_TIMEOUT)
        set(arg_TIMEOUT 120)
    endif()
    if(NOT arg_GPUS)
        set(arg_GPUS 1)
    endif()
    tb_test(${name} TIMEOUT ${arg_TIMEOUT} SOURCES ${arg_SOURCES})
    string(REPLACE "/" "_" target ${name})
    target_include_directories(${target} SYSTEM PRIVATE ${TB_CUDA_INCLUDE})
    add_dependencies(${target} fake_cuda)
    set_tests_properties(${name} PROPERTIES
        SKIP_RETURN_CODE 77
        LABELS gpu
        ENVIRONMENT "LD_LIBRARY_PATH=${PROJECT_BINARY_DIR}/tests/fake_cuda;FAKE_CUDA_GPUS=${arg_GPUS}"
    )
    tb_pack_test(${name} ${target} ${arg_TIMEOUT})
endfunction()

# tb_two_gpus_test(device/cuda/cuda_test [VARIABLE=VALUE...]): that test again, with two GPUs that have access to each
# other's memory, and with two that have not. Where there is one real GPU, it skips itself.
function(tb_two_gpus_test name)
    string(REPLACE "/" "_" target ${name})
    foreach(kind IN ITEMS peers no_peers)
        set(environment "LD_LIBRARY_PATH=${PROJECT_BINARY_DIR}/tests/fake_cuda;FAKE_CUDA_GPUS=2;${ARGN}")
        if(kind STREQUAL "no_peers")
            list(APPEND environment FAKE_CUDA_NO_PEERS=1)
        endif()
        add_test(NAME ${name}_${kind} COMMAND ${target})
        set_tests_properties(${name}_${kind} PROPERTIES
            TIMEOUT 300 SKIP_RETURN_CODE 77 LABELS gpu ENVIRONMENT "${environment}")
    endforeach()
    tb_pack_test(${name}_peers ${target} 300 ${ARGN})
endfunction()

# tb_one_gpu_test(bus/gpus_test VARIABLE=VALUE...): the part of that test for which one GPU is enough.
function(tb_one_gpu_test name)
    string(REPLACE "/" "_" target ${name})
    add_test(NAME ${name}_one COMMAND ${target})
    set_tests_properties(${name}_one PROPERTIES TIMEOUT 300 SKIP_RETURN_CODE 77 LABELS gpu
        ENVIRONMENT "LD_LIBRARY_PATH=${PROJECT_BINARY_DIR}/tests/fake_cuda;FAKE_CUDA_GPUS=1;${ARGN}")
    tb_pack_test(${name}_one ${target} 300 ${ARGN})
endfunction()

# tb_cuda_tensors(target): a test can have its tensors on a GPU (tests/support/tensor_memory.h).
function(tb_cuda_tensors target)
    target_sources(${target} PRIVATE tests/support/cuda_tensors.c)
    target_compile_definitions(${target} PRIVATE TB_TEST_CUDA)
    target_include_directories(${target} SYSTEM PRIVATE ${TB_CUDA_INCLUDE})
    foreach(function IN ITEMS tb_send tb_recv tb_wait tb_wait_group tb_proceed tb_transfer_query tb_copy_run
            tb_reshard_execute_plan tb_ir_execute)
        target_link_options(${target} PRIVATE LINKER:--wrap=${function})
    endforeach()
    add_dependencies(${target} fake_cuda)
endfunction()
