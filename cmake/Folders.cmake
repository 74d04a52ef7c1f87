# tb_folder(folder [USES folder...] [KINDS kind...] SOURCES file...): a folder of src/ as the OBJECT library
# folder_objects: these files, and all but the tests in the folders of these kinds.
#
# Its files see their own folder, those behind USES, and all that those use. The include path has a directory for each
# of them, with a link to that folder as the only entry, so an include in the wrong direction does not build.
function(tb_folder folder)
    cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "USES;KINDS;SOURCES")
    foreach(kind IN LISTS arg_KINDS)
        file(GLOB files RELATIVE ${PROJECT_SOURCE_DIR} CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/${folder}/${kind}/*.c)
        list(FILTER files EXCLUDE REGEX "_test\\.c$")
        list(APPEND arg_SOURCES ${files})
    endforeach()
    set(view ${PROJECT_BINARY_DIR}/folders/${folder})
    file(MAKE_DIRECTORY ${view})
    file(CREATE_LINK ${PROJECT_SOURCE_DIR}/src/${folder} ${view}/${folder} SYMBOLIC)
    tb_objects(${folder}_objects USES ${arg_USES} SOURCES ${arg_SOURCES})
    target_include_directories(${folder}_objects PUBLIC ${view} ${PROJECT_SOURCE_DIR}/include)
endfunction()

# tb_objects(target [USES folder...] SOURCES file...): files that see these folders; position independent, because one
# compilation serves the static and the shared library.
function(tb_objects target)
    cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "USES;SOURCES")
    add_library(${target} OBJECT ${arg_SOURCES})
    set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE ON)
    list(TRANSFORM arg_USES APPEND _objects)
    target_link_libraries(${target} PUBLIC ${arg_USES} PRIVATE ${library_dependencies})
endfunction()
