# Completion for bash, zsh and fish, which the tool writes from the tables of its help: build/PRESET/completion, and the
# folders where the shells look for it when installed. Included by CMakeLists.txt, and run as a script, with TOOL and
# FOLDER, once the tool is built.

set(completion_bash bash-completion/completions/tensorbus)
set(completion_zsh zsh/site-functions/_tensorbus)
set(completion_fish fish/vendor_completions.d/tensorbus.fish)
set(completion_shells bash zsh fish)

if(CMAKE_SCRIPT_MODE_FILE)
    foreach(shell IN LISTS completion_shells)
        execute_process(
            COMMAND ${TOOL} help --completion ${shell} OUTPUT_VARIABLE text COMMAND_ERROR_IS_FATAL ANY
        )
        file(WRITE ${FOLDER}/${completion_${shell}} "${text}")
    endforeach()
    return()
endif()

if(NOT CMAKE_CROSSCOMPILING)
    set(completion_folder ${PROJECT_BINARY_DIR}/completion)
    add_custom_command(
        OUTPUT ${completion_folder}/${completion_fish}
        COMMAND
            ${CMAKE_COMMAND} -DTOOL=$<TARGET_FILE:tensorbus> -DFOLDER=${completion_folder} -P
            ${CMAKE_CURRENT_LIST_FILE}
        DEPENDS tensorbus ${CMAKE_CURRENT_LIST_FILE}
        COMMENT "Writing completion for shells"
        VERBATIM
    )
    add_custom_target(completion ALL DEPENDS ${completion_folder}/${completion_fish})
    install(DIRECTORY ${completion_folder}/ DESTINATION ${CMAKE_INSTALL_DATADIR})
    if(SKBUILD)
        install(DIRECTORY ${completion_folder}/ DESTINATION ${SKBUILD_DATA_DIR}/share COMPONENT python)
    endif()
endif()
