/* OpenUCX, loaded when the first ucx transport is opened, so that tensorbus works without it. */
#ifndef TB_TRANSPORT_UCX_UCX_LOAD_H
#define TB_TRANSPORT_UCX_UCX_LOAD_H

#include "base/error.h"

#include <ucp/api/ucp.h>

/* Its functions, without their prefix. */
typedef struct ucx_functions {
    __typeof__(&ucp_get_version) get_version;
    __typeof__(&ucp_config_read) config_read;
    __typeof__(&ucp_config_modify) config_modify;
    __typeof__(&ucp_config_release) config_release;
    __typeof__(&ucp_init_version) init_version;
    __typeof__(&ucp_cleanup) cleanup;
    __typeof__(&ucp_context_query) context_query;
    __typeof__(&ucp_context_print_info) context_print_info;
    __typeof__(&ucp_worker_create) worker_create;
    __typeof__(&ucp_worker_destroy) worker_destroy;
    __typeof__(&ucp_worker_query) worker_query;
    __typeof__(&ucp_worker_get_address) worker_get_address;
    __typeof__(&ucp_worker_release_address) worker_release_address;
    __typeof__(&ucp_worker_get_efd) worker_get_efd;
    __typeof__(&ucp_worker_arm) worker_arm;
    __typeof__(&ucp_worker_progress) worker_progress;
    __typeof__(&ucp_worker_set_am_recv_handler) worker_set_am_recv_handler;
    __typeof__(&ucp_ep_create) ep_create;
    __typeof__(&ucp_ep_close_nbx) ep_close_nbx;
    __typeof__(&ucp_ep_flush_nbx) ep_flush_nbx;
    __typeof__(&ucp_ep_print_info) ep_print_info;
    __typeof__(&ucp_am_send_nbx) am_send_nbx;
    __typeof__(&ucp_am_recv_data_nbx) am_recv_data_nbx;
    __typeof__(&ucp_tag_send_nbx) tag_send_nbx;
    __typeof__(&ucp_tag_recv_nbx) tag_recv_nbx;
    __typeof__(&ucp_request_cancel) request_cancel;
    __typeof__(&ucp_request_free) request_free;
    __typeof__(&ucs_status_string) status_string;
} ucx_functions;

/* Once loaded it stays. */
tb_status ucx_load(const ucx_functions **out);

/* Between these two UCX has threads, which a forked child lacks; there ucx_begin_use fails. */
tb_status ucx_begin_use(void);
void ucx_end_use(void);

#endif
