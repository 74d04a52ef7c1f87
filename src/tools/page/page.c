/* The page's file, as bytes: see page.html. */
__asm__(".section .rodata\n"
        ".global tool_page, tool_page_end\n"
        ".hidden tool_page, tool_page_end\n"
        "tool_page:\n"
        ".incbin \"" TB_PAGE "\"\n"
        "tool_page_end:\n"
        ".byte 0\n"
        ".previous\n");

extern const char tool_page[]; /* C allows no file without a declaration */
