# cmake -P Fatbin.cmake: compiles the kernels of the CUDA device, unless the same files were compiled before with the same
# flags, for another build folder: compiling takes minutes.
#
# -D nvcc=PROGRAM -D flags=LIST -D includes=LIST -D source=FILE -D inputs=LIST -D cache=FOLDER -D fatbin=FILE

execute_process(COMMAND ${nvcc} --version OUTPUT_VARIABLE version)
set(text "${version}${flags}")
foreach(input IN LISTS inputs)
    file(SHA256 ${input} hash)
    string(APPEND text ${hash})
endforeach()
string(SHA256 name "${text}")
set(kept ${cache}/${name}.fatbin)
if(NOT EXISTS ${kept})
    file(MAKE_DIRECTORY ${cache})
    string(RANDOM LENGTH 12 unique) # builds of other folders may compile it at the same time
    set(made ${kept}.${unique})
    execute_process(COMMAND ${nvcc} ${flags} ${includes} -o ${made} ${source} RESULT_VARIABLE result)
    if(NOT result EQUAL 0)
        message(FATAL_ERROR "nvcc failed")
    endif()
    file(RENAME ${made} ${kept})
endif()
file(COPY_FILE ${kept} ${fatbin})
