/* The pages' files as bytes, each with a 0 behind it: page.html, plan.html. */
#define PAGE(name, file)                                                                                               \
    __asm__(".section .rodata\n"                                                                                       \
            ".global " #name ", " #name "_end\n"                                                                       \
            ".hidden " #name ", " #name "_end\n" #name ":\n"                                                           \
            ".incbin \"" TB_PAGES "/" file "\"\n" #name "_end:\n"                                                      \
            ".byte 0\n"                                                                                                \
            ".previous\n")

PAGE(tool_page, "page.html");
PAGE(tool_plan_page, "plan.html");

extern const char tool_page[]; /* C allows no file without a declaration */
