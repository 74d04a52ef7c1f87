# The C library of MessagePack, which is called msgpackc up to version 4, msgpack-c since. Not by pkg-config: that of
# Debian 13 names no folder for headers that exists.
#
# MsgpackC::MsgpackC, and MsgpackC_NAME as the linker calls it.

find_path(MsgpackC_INCLUDE_DIR msgpack.h)
find_library(MsgpackC_LIBRARY NAMES msgpack-c msgpackc)
mark_as_advanced(MsgpackC_INCLUDE_DIR MsgpackC_LIBRARY)

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(MsgpackC REQUIRED_VARS MsgpackC_LIBRARY MsgpackC_INCLUDE_DIR)

if(MsgpackC_FOUND AND NOT TARGET MsgpackC::MsgpackC)
    add_library(MsgpackC::MsgpackC UNKNOWN IMPORTED)
    set_target_properties(MsgpackC::MsgpackC PROPERTIES
        IMPORTED_LOCATION "${MsgpackC_LIBRARY}" INTERFACE_INCLUDE_DIRECTORIES "${MsgpackC_INCLUDE_DIR}"
    )
endif()
get_filename_component(MsgpackC_NAME "${MsgpackC_LIBRARY}" NAME_WE)
string(REGEX REPLACE "^lib" "" MsgpackC_NAME "${MsgpackC_NAME}")
