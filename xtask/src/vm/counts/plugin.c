/* A plugin for qemu's emulated CPUs: counts the instructions that the guest executes and the bytes
 * that they load and store, between two marks.
 *
 * A mark is an instruction without effect that the guest executes (crates/lab-sys/src/marker.rs).
 * After the mark "report", the plugin appends a line to the file that its argument `counts` names:
 *
 *     KERNEL USER LOADED STORED STRING_LOADED STRING_STORED
 *
 * The first two are instructions, and the others are bytes. STRING_… are the bytes of the string
 * instructions (movs, stos), with which the kernel copies and clears memory. String instructions do
 * not count as instructions, because qemu executes each repetition as an instruction. Bytes that
 * helpers of qemu move, such as the state of the vector unit at a change of the task, are not
 * counted.
 *
 * The interface is qemu's plugin API of version 1 (qemu 4.2 to 8.x), of include/qemu/qemu-plugin.h
 * in qemu's sources. Debian does not package the header, so the declarations are repeated here.
 */
#include <inttypes.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef uint64_t qemu_plugin_id_t;
typedef uint32_t qemu_plugin_meminfo_t;
struct qemu_plugin_tb;
struct qemu_plugin_insn;
typedef struct qemu_info_t qemu_info_t;
enum { NO_REGISTERS = 0, LOADS_AND_STORES = 3 };

typedef void (*translated_fn)(qemu_plugin_id_t, struct qemu_plugin_tb *);
typedef void (*executed_fn)(unsigned, void *);
typedef void (*accessed_fn)(unsigned, qemu_plugin_meminfo_t, uint64_t, void *);
void qemu_plugin_register_vcpu_tb_trans_cb(qemu_plugin_id_t, translated_fn);
void qemu_plugin_register_vcpu_insn_exec_cb(struct qemu_plugin_insn *, executed_fn, int, void *);
void qemu_plugin_register_vcpu_mem_cb(struct qemu_plugin_insn *, accessed_fn, int, int, void *);
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *);
struct qemu_plugin_insn *qemu_plugin_tb_get_insn(const struct qemu_plugin_tb *, size_t);
const void *qemu_plugin_insn_data(const struct qemu_plugin_insn *);
size_t qemu_plugin_insn_size(const struct qemu_plugin_insn *);
uint64_t qemu_plugin_insn_vaddr(const struct qemu_plugin_insn *);
unsigned qemu_plugin_mem_size_shift(qemu_plugin_meminfo_t);
bool qemu_plugin_mem_is_store(qemu_plugin_meminfo_t);

__attribute__((visibility("default"))) int qemu_plugin_version = 1;

/* What an instruction is, as the data of its callbacks. */
enum { IS_USER = 1, IS_STRING = 2 };
/* The marks, which are the last byte of the instruction. */
enum mark { BEGIN = 1, END = 2, REPORT = 3, RESET = 4 };

static FILE *report;
/* The guest has one CPU. */
static bool counts;
static uint64_t instructions[2], bytes[2], string_bytes[2];

static void on_execution(unsigned cpu, void *kind) {
    (void)cpu;
    if (counts) instructions[(uintptr_t)kind]++;
}

static void on_access(unsigned cpu, qemu_plugin_meminfo_t info, uint64_t address, void *kind) {
    (void)cpu, (void)address;
    if (!counts) return;
    bool is_store = qemu_plugin_mem_is_store(info);
    uint64_t size = 1ull << qemu_plugin_mem_size_shift(info);
    bytes[is_store] += size;
    if ((uintptr_t)kind & IS_STRING) string_bytes[is_store] += size;
}

static void on_mark(unsigned cpu, void *mark) {
    (void)cpu;
    counts = (uintptr_t)mark == BEGIN;
    if ((uintptr_t)mark != REPORT && (uintptr_t)mark != RESET) return;
    if ((uintptr_t)mark == REPORT) {
        fprintf(report, "%" PRIu64 " %" PRIu64 " %" PRIu64 " %" PRIu64 " %" PRIu64 " %" PRIu64 "\n",
                instructions[0], instructions[IS_USER], bytes[0], bytes[1], string_bytes[0],
                string_bytes[1]);
        fflush(report);
    }
    memset(instructions, 0, sizeof instructions);
    memset(bytes, 0, sizeof bytes);
    memset(string_bytes, 0, sizeof string_bytes);
}

/* The mark of an instruction: nopl with the displacement "hau" and a number. 0 if it is not a mark. */
static enum mark mark_of(const uint8_t *code, size_t size) {
    static const uint8_t nop[] = {0x0f, 0x1f, 0x84, 0x00, 'h', 'a', 'u'};
    bool is_mark = size == sizeof nop + 1 && memcmp(code, nop, sizeof nop) == 0;
    return is_mark ? code[sizeof nop] : 0;
}

/* Whether an instruction is movs or stos, after any prefixes. */
static bool is_string(const uint8_t *code, size_t size) {
    for (size_t at = 0; at < size; at++) {
        uint8_t byte = code[at];
        bool is_prefix = byte == 0x66 || byte == 0x67 || byte == 0xf2 || byte == 0xf3 ||
                         (byte & 0xf0) == 0x40;
        if (!is_prefix) return byte == 0xa4 || byte == 0xa5 || byte == 0xaa || byte == 0xab;
    }
    return false;
}

static void on_translation(qemu_plugin_id_t id, struct qemu_plugin_tb *block) {
    (void)id;
    size_t count = qemu_plugin_tb_n_insns(block);
    for (size_t i = 0; i < count; i++) {
        struct qemu_plugin_insn *instruction = qemu_plugin_tb_get_insn(block, i);
        const uint8_t *code = qemu_plugin_insn_data(instruction);
        size_t size = qemu_plugin_insn_size(instruction);
        /* The upper half of the addresses belongs to the kernel. */
        uintptr_t kind = qemu_plugin_insn_vaddr(instruction) >> 63 ? 0 : IS_USER;
        if (is_string(code, size)) kind |= IS_STRING;
        enum mark mark = mark_of(code, size);
        if (mark != 0)
            qemu_plugin_register_vcpu_insn_exec_cb(instruction, on_mark, NO_REGISTERS,
                                                   (void *)(uintptr_t)mark);
        if (!(kind & IS_STRING))
            qemu_plugin_register_vcpu_insn_exec_cb(instruction, on_execution, NO_REGISTERS,
                                                   (void *)kind);
        qemu_plugin_register_vcpu_mem_cb(instruction, on_access, NO_REGISTERS, LOADS_AND_STORES,
                                         (void *)kind);
    }
}

__attribute__((visibility("default"))) int qemu_plugin_install(qemu_plugin_id_t id,
                                                                const qemu_info_t *info, int count,
                                                                char **arguments) {
    (void)info;
    const char prefix[] = "counts=";
    if (count != 1 || strncmp(arguments[0], prefix, strlen(prefix)) != 0) {
        fprintf(stderr, "the plugin needs counts=PATH\n");
        return -1;
    }
    report = fopen(arguments[0] + strlen(prefix), "w");
    if (report == NULL) {
        perror(arguments[0]);
        return -1;
    }
    qemu_plugin_register_vcpu_tb_trans_cb(id, on_translation);
    return 0;
}
