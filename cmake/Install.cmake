# What `cmake --install` lays down beside the tool: headers, both libraries, and the files by which
# pkg-config and find_package find them. All of it is relative to the prefix, which may be chosen as
# late as at installation.

include(CMakePackageConfigHelpers)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/tensorbus)

install(
    DIRECTORY include/tensorbus
    DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
    FILES_MATCHING PATTERN "*.h"
)

# Two exports: only the static library makes its user find jansson and msgpack.
install(TARGETS tensorbus_shared EXPORT tensorbus-shared)
install(TARGETS tensorbus_static EXPORT tensorbus-static)
foreach(kind IN ITEMS shared static)
    install(EXPORT tensorbus-${kind} NAMESPACE tensorbus:: DESTINATION ${package_dir})
endforeach()

configure_package_config_file(
    cmake/tensorbus-config.cmake.in ${PROJECT_BINARY_DIR}/cmake/tensorbus-config.cmake
    INSTALL_DESTINATION ${package_dir}
    NO_SET_AND_CHECK_MACRO
)
write_basic_package_version_file(
    ${PROJECT_BINARY_DIR}/cmake/tensorbus-config-version.cmake
    COMPATIBILITY SameMinorVersion
)
install(
    FILES
        ${PROJECT_BINARY_DIR}/cmake/tensorbus-config.cmake
        ${PROJECT_BINARY_DIR}/cmake/tensorbus-config-version.cmake
        cmake/FindMsgpackC.cmake
    DESTINATION ${package_dir}
)

file(RELATIVE_PATH pc_prefix ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})
string(REGEX REPLACE "/$" "" pc_prefix ${pc_prefix})
configure_file(cmake/tensorbus.pc.in ${PROJECT_BINARY_DIR}/cmake/tensorbus.pc @ONLY)
install(
    FILES ${PROJECT_BINARY_DIR}/cmake/tensorbus.pc
    DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig
)
