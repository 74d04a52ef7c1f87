# The man pages, which the tool writes from the tables of its help: build/PRESET/man, and share/man/man1 when installed.
# Which commands there are is asked of the tool, so that no list has to follow them. Included by CMakeLists.txt, and run
# as a script, with TOOL and FOLDER, once the tool is built.

if(CMAKE_SCRIPT_MODE_FILE)
    function(write_page name)
        execute_process(
            COMMAND ${TOOL} help --man ${ARGN}
            OUTPUT_FILE ${FOLDER}/${name}.1
            COMMAND_ERROR_IS_FATAL ANY
        )
    endfunction()

    execute_process(COMMAND ${TOOL} --help OUTPUT_VARIABLE overview COMMAND_ERROR_IS_FATAL ANY)
    string(REGEX MATCHALL "\n  [a-z]+  " commands "${overview}")
    file(REMOVE_RECURSE ${FOLDER})
    file(MAKE_DIRECTORY ${FOLDER})
    write_page(tensorbus)
    foreach(command IN LISTS commands)
        string(STRIP "${command}" command)
        if(NOT command STREQUAL help) # has no options of its own: the first page tells of it
            write_page(tensorbus-${command} ${command})
        endif()
    endforeach()
    return()
endif()

# A tool for another machine can't be asked.
if(NOT CMAKE_CROSSCOMPILING)
    set(man_folder ${PROJECT_BINARY_DIR}/man)
    add_custom_command(
        OUTPUT ${man_folder}/tensorbus.1
        COMMAND ${CMAKE_COMMAND} -DTOOL=$<TARGET_FILE:tensorbus> -DFOLDER=${man_folder} -P ${CMAKE_CURRENT_LIST_FILE}
        DEPENDS tensorbus ${CMAKE_CURRENT_LIST_FILE}
        COMMENT "Writing the man pages"
        VERBATIM
    )
    add_custom_target(man_pages ALL DEPENDS ${man_folder}/tensorbus.1)
    install(DIRECTORY ${man_folder}/ DESTINATION ${CMAKE_INSTALL_MANDIR}/man1 FILES_MATCHING PATTERN "*.1")
endif()
