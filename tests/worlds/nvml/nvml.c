/* A stand-in for the driver's libnvidia-ml.so.1, told by a text file what to answer.
 *
 * Environment: MUSTER_FAKE_NVML names the state file (its lines are described in fake.py), read
 * again whenever it was replaced; MUSTER_FAKE_NVML_COUNTS a file in which calls are counted.
 * Layouts and numbers are those that nvidia-ml-py 13.615 encodes; behaviour beyond them is what
 * nvml.h documents or what users of real drivers reported.
 *
 * One lock guards everything. A call that hangs or waits lets go of it, so others go on; whatever
 * points into `state` is looked up again afterwards.
 */

#define _GNU_SOURCE
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/inotify.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

typedef unsigned int uint;
typedef unsigned long long ull;

enum {
    OK = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9,
    TIMEOUT = 10,
    GPU_IS_LOST = 15,
    NO_MEMORY = 20,
    VERSION_MISMATCH = 25,
    UNKNOWN = 999
};

enum {
    GPUS_MAX = 64,
    LINKS_MAX = 36,
    GI_PROFILES = 18,
    CI_PROFILES = 9,
    SETS_MAX = 256,
    HANDLES_MAX = 16384,
    WATCHES_MAX = 16,
    EVENT_XID = 8,
    REMOTE_GPU = 0,
    REMOTE_SWITCH = 2
};

#define FUNCTIONS(F)                                                                               \
    F(nvmlInitWithFlags)                                                                           \
    F(nvmlInit_v2)                                                                                 \
    F(nvmlShutdown)                                                                                \
    F(nvmlSystemGetDriverVersion)                                                                  \
    F(nvmlSystemGetNVMLVersion)                                                                    \
    F(nvmlSystemGetCudaDriverVersion)                                                              \
    F(nvmlSystemGetCudaDriverVersion_v2)                                                           \
    F(nvmlDeviceGetCount_v2)                                                                       \
    F(nvmlDeviceGetHandleByIndex_v2)                                                               \
    F(nvmlDeviceGetHandleByUUID)                                                                   \
    F(nvmlDeviceGetHandleByPciBusId_v2)                                                            \
    F(nvmlDeviceGetHandleBySerial)                                                                 \
    F(nvmlDeviceGetUUID)                                                                           \
    F(nvmlDeviceGetName)                                                                           \
    F(nvmlDeviceGetSerial)                                                                         \
    F(nvmlDeviceGetVbiosVersion)                                                                   \
    F(nvmlDeviceGetIndex)                                                                          \
    F(nvmlDeviceGetMinorNumber)                                                                    \
    F(nvmlDeviceGetPciInfo_v3)                                                                     \
    F(nvmlDeviceGetMemoryInfo)                                                                     \
    F(nvmlDeviceGetMemoryInfo_v2)                                                                  \
    F(nvmlDeviceGetCudaComputeCapability)                                                          \
    F(nvmlDeviceGetArchitecture)                                                                   \
    F(nvmlDeviceGetBrand)                                                                          \
    F(nvmlDeviceGetBoardId)                                                                        \
    F(nvmlDeviceGetMultiGpuBoard)                                                                  \
    F(nvmlDeviceGetNumaNodeId)                                                                     \
    F(nvmlDeviceGetComputeMode)                                                                    \
    F(nvmlDeviceGetPersistenceMode)                                                                \
    F(nvmlDeviceGetNumGpuCores)                                                                    \
    F(nvmlDeviceGetPowerUsage)                                                                     \
    F(nvmlDeviceGetUtilizationRates)                                                               \
    F(nvmlDeviceGetEccMode)                                                                        \
    F(nvmlDeviceGetMigMode)                                                                        \
    F(nvmlDeviceGetMaxMigDeviceCount)                                                              \
    F(nvmlDeviceGetMigDeviceHandleByIndex)                                                         \
    F(nvmlDeviceIsMigDeviceHandle)                                                                 \
    F(nvmlDeviceGetGpuInstanceId)                                                                  \
    F(nvmlDeviceGetComputeInstanceId)                                                              \
    F(nvmlDeviceGetDeviceHandleFromMigDeviceHandle)                                                \
    F(nvmlDeviceGetAttributes_v2)                                                                  \
    F(nvmlDeviceGetGpuInstanceProfileInfo)                                                         \
    F(nvmlDeviceGetGpuInstanceProfileInfoV)                                                        \
    F(nvmlDeviceGetGpuInstanceById)                                                                \
    F(nvmlGpuInstanceGetInfo)                                                                      \
    F(nvmlGpuInstanceGetComputeInstanceProfileInfo)                                                \
    F(nvmlGpuInstanceGetComputeInstanceProfileInfoV)                                               \
    F(nvmlGpuInstanceGetComputeInstanceById)                                                       \
    F(nvmlComputeInstanceGetInfo_v2)                                                               \
    F(nvmlDeviceGetTopologyCommonAncestor)                                                         \
    F(nvmlDeviceGetP2PStatus)                                                                      \
    F(nvmlDeviceGetNvLinkState)                                                                    \
    F(nvmlDeviceGetNvLinkVersion)                                                                  \
    F(nvmlDeviceGetNvLinkCapability)                                                               \
    F(nvmlDeviceGetNvLinkRemotePciInfo_v2)                                                         \
    F(nvmlDeviceGetNvLinkRemoteDeviceType)                                                         \
    F(nvmlDeviceGetNvLinkErrorCounter)                                                             \
    F(nvmlDeviceGetGpuFabricInfo)                                                                  \
    F(nvmlDeviceGetGpuFabricInfoV)                                                                 \
    F(nvmlDeviceGetFieldValues)                                                                    \
    F(nvmlDeviceGetRemappedRows)                                                                   \
    F(nvmlDeviceGetTotalEccErrors)                                                                 \
    F(nvmlDeviceGetCurrentClocksEventReasons)                                                      \
    F(nvmlDeviceGetCurrentClocksThrottleReasons)                                                   \
    F(nvmlDeviceGetTemperature)                                                                    \
    F(nvmlDeviceGetTemperatureV)                                                                   \
    F(nvmlDeviceGetTemperatureThreshold)                                                           \
    F(nvmlDeviceGetRetiredPagesPendingStatus)                                                      \
    F(nvmlDeviceGetSramEccErrorStatus)                                                             \
    F(nvmlDeviceGetPcieReplayCounter)                                                              \
    F(nvmlDeviceGetSupportedEventTypes)                                                            \
    F(nvmlDeviceRegisterEvents)                                                                    \
    F(nvmlEventSetCreate)                                                                          \
    F(nvmlEventSetWait_v2)                                                                         \
    F(nvmlEventSetFree)

/* Uses that a real driver answers with a crash or nonsense; tests assert that there are none. */
#define MISUSES(F)                                                                                 \
    F(shutdown_in_flight)                                                                          \
    F(free_in_flight)                                                                              \
    F(two_waiters)                                                                                 \
    F(stale_handle)                                                                                \
    F(stale_set)                                                                                   \
    F(undefined_set)                                                                               \
    F(forked)

#define AS_ENUM(name) FN_##name,
#define AS_MISUSE_ENUM(name) MISUSE_##name,
#define AS_TEXT(name) #name,
#define AS_MISUSE_TEXT(name) "misuse." #name,
enum { FUNCTIONS(AS_ENUM) MISUSES(AS_MISUSE_ENUM) ROWS };
static const char *const row_names[ROWS] = {FUNCTIONS(AS_TEXT) MISUSES(AS_MISUSE_TEXT)};

/* What one GPU answers, and what a healthy H100 would; "-" is NOT_SUPPORTED, "!n" error n. */
#define VALUES(V)                                                                                  \
    V(minor, "0")                                                                                  \
    V(memory, "85520809984")                                                                       \
    V(used, "0")                                                                                   \
    V(reserved, "556793856")                                                                       \
    V(cc_major, "9")                                                                               \
    V(cc_minor, "0")                                                                               \
    V(arch, "9")                                                                                   \
    V(brand, "14")                                                                                 \
    V(board, "0")                                                                                  \
    V(multi_gpu, "0")                                                                              \
    V(numa, "-")                                                                                   \
    V(compute_mode, "0")                                                                           \
    V(persistence, "1")                                                                            \
    V(cores, "16896")                                                                              \
    V(power, "70000")                                                                              \
    V(util, "0")                                                                                   \
    V(ecc_mode, "1")                                                                               \
    V(pci_device, "0x233010DE")                                                                    \
    V(pci_subsystem, "0x16C110DE")                                                                 \
    V(mig, "-")                                                                                    \
    V(mig_pending, "-")                                                                            \
    V(max_mig, "7")                                                                                \
    V(hole, "6")                                                                                   \
    V(switch_links, "0")                                                                           \
    V(nvlink_version, "4")                                                                         \
    V(fabric, "0")                                                                                 \
    V(fabric_status, "0")                                                                          \
    V(fabric_health, "0")                                                                          \
    V(fabric_summary, "0")                                                                         \
    V(clique, "0")                                                                                 \
    V(recovery, "0")                                                                               \
    V(remap_corrected, "0")                                                                        \
    V(remap_uncorrected, "0")                                                                      \
    V(remap_pending, "0")                                                                          \
    V(remap_failed, "0")                                                                           \
    V(retired, "-")                                                                                \
    V(ecc, "0")                                                                                    \
    V(ecc_corrected, "0")                                                                          \
    V(sram, "0")                                                                                   \
    V(sram_exceeded, "0")                                                                          \
    V(throttle, "0")                                                                               \
    V(temp, "35")                                                                                  \
    V(memory_temp, "45")                                                                           \
    V(slowdown, "92")                                                                              \
    V(shutdown, "95")                                                                              \
    V(gpu_max, "87")                                                                               \
    V(memory_max, "95")                                                                            \
    V(replay, "0")                                                                                 \
    V(events, "0x1F")

#define AS_VALUE_ENUM(name, text) V_##name,
#define AS_VALUE_NAME(name, text) #name,
#define AS_VALUE_TEXT(name, text) text,
enum { VALUES(AS_VALUE_ENUM) VALUES_COUNT };
static const char *const value_names[] = {VALUES(AS_VALUE_NAME)};
static const char *const value_texts[] = {VALUES(AS_VALUE_TEXT)};

struct value {
    bool told;
    int code;
    ull n;
};

struct gpu {
    int number;
    bool lost;
    char uuid[96], name[96], bus[32], serial[30], vbios[32];
    unsigned char cluster[16];
    struct value value[VALUES_COUNT];
};

struct mig {
    int gpu, slot;
    uint gi, ci, gprofile, cprofile, start, size;
    char uuid[96], name[96];
    uint sm, ce, dec, enc, jpeg, ofa, gi_slices, ci_slices;
    ull memory_mb;
};

/* gpu is -1 in both where a profile is that of every GPU. */
struct gprofile {
    int gpu;
    uint profile, id, p2p, slices, instances, sm, ce, dec, enc, jpeg, ofa;
    ull memory_mb;
    char name[96];
};

struct cprofile {
    int gpu;
    uint gprofile, profile, id, slices, instances, sm, ce, dec, enc, jpeg, ofa;
    char name[96];
};

struct link {
    int a, b, nvlinks;
    uint level, p2p;
};

struct nvlink {
    int gpu, link;
    uint state;
    ull errors;
};

struct field {
    int gpu;
    uint id, type;
    int code;
    ull n;
};

struct rule {
    bool hang;
    int gpu, fn, code;
    long ms, times, used;
    char text[160];
};

struct event {
    ull seq, type, data;
    int gpu;
    uint gi, ci;
    bool nowhere;
};

#define LIST(type) struct { struct type *at; int count; }

struct state {
    bool absent, hotplug;
    char driver[80];
    int cuda, init, stale_code;
    long epoch, wait_cut_ms;
    int gpus;
    struct gpu gpu[GPUS_MAX];
    LIST(mig) mig;
    LIST(gprofile) gprofile;
    LIST(cprofile) cprofile;
    LIST(link) link;
    LIST(nvlink) nvlink;
    LIST(field) field;
    LIST(rule) rule;
    LIST(event) event;
};

enum kind { NOWHERE = 0, GPU = 1, MIG = 2, GI = 4, CI = 8 };

struct handle {
    enum kind kind;
    uint generation, gi, ci;
    char gpu[96], mig[96];
};

struct registration {
    char gpu[96];
    ull mask, seen;
};

struct set {
    bool used, undefined;
    uint generation;
    int waiters, count;
    struct registration on[GPUS_MAX];
};

/* What a handle stands for in the state of this moment. */
struct place {
    const struct gpu *gpu;
    const struct mig *mig;
    struct handle *handle;
};

struct counts {
    char magic[8];
    uint32_t rows, peak;
    char reserved[48];
    struct { char name[48]; uint64_t calls, failures; } row[ROWS];
};

static pthread_mutex_t door = PTHREAD_MUTEX_INITIALIZER;
static struct state *state;
static char state_path[4096];
static uint state_paths;
static struct stat state_stat;
static struct counts *counts;
static char counts_path[4096];
static int in_flight;

static int references;
static pid_t owner;
static uint generation = 1;
static long epoch_at_init;
static char latched[GPUS_MAX][96];
static int latched_count;

static struct handle handles[HANDLES_MAX];
static int handles_used;
static struct set sets[SETS_MAX];
static int set_last;

static void refuse(const char *line, const char *why) {
    dprintf(2, "fake nvml: %s: %s\n", why, line);
    abort();
}

static void copy(char *out, size_t size, const char *text) {
    if (snprintf(out, size, "%s", text) >= (int)size)
        refuse(text, "too long");
}

static long now_ms(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec * 1000 + at.tv_nsec / 1000000;
}

static ull number(const char *text, const char *line) {
    char *end;
    errno = 0;
    ull n = strtoull(text, &end, 0);
    if (errno || *end || end == text)
        refuse(line, "not a number");
    return n;
}

static struct value value_of(const char *text, const char *line) {
    if (!strcmp(text, "-"))
        return (struct value){true, NOT_SUPPORTED, 0};
    if (*text == '!')
        return (struct value){true, (int)number(text + 1, line), 0};
    return (struct value){true, OK, number(text, line)};
}

static void *grow(void *items, int *count, size_t size) {
    char *grown = realloc(items, (size_t)(*count + 1) * size);
    if (!grown)
        refuse("", "no memory");
    memset(grown + (size_t)*count * size, 0, size);
    ++*count;
    return grown;
}

#define PUSH(list)                                                                                 \
    ((list).at = grow((list).at, &(list).count, sizeof *(list).at), &(list).at[(list).count - 1])

/* The words of one line: the positional ones, then key=value. */
struct line {
    const char *text;
    char *word[128];
    int count;
};

static const char *word(const struct line *line, int i) {
    if (i >= line->count || strchr(line->word[i], '='))
        refuse(line->text, "a word is missing");
    return line->word[i];
}

static int gpu_word(const struct line *line, int i) {
    if (!strcmp(word(line, i), "*"))
        return -1;
    ull n = number(word(line, i), line->text);
    if (n >= GPUS_MAX)
        refuse(line->text, "no such GPU");
    return (int)n;
}

/* Split key=value in place; the caller goes through i until it is NULL. */
static char *pair(const struct line *line, int i, char **value) {
    if (i >= line->count)
        return NULL;
    *value = strchr(line->word[i], '=');
    if (!*value)
        refuse(line->text, "key=value expected");
    *(*value)++ = 0;
    return line->word[i];
}

static void spaced(char *text) {
    for (; *text; text++)
        if (*text == '_')
            *text = ' ';
}

static void read_uuid(unsigned char *out, const char *text, const char *line) {
    int digits = 0;
    memset(out, 0, 16);
    for (; *text; text++) {
        if (*text == '-')
            continue;
        if (!isxdigit((unsigned char)*text) || digits == 32)
            refuse(line, "not a uuid");
        int digit = isdigit((unsigned char)*text) ? *text - '0' : (tolower(*text) - 'a' + 10);
        out[digits / 2] = (unsigned char)(out[digits / 2] << 4 | digit);
        digits++;
    }
}

static void set_value(struct gpu *gpu, int key, const char *text, const char *line) {
    gpu->value[key] = value_of(text, line);
}

static void read_gpu_pair(struct gpu *gpu, const char *key, char *value, const char *line) {
    if (!strcmp(key, "uuid"))
        copy(gpu->uuid, sizeof gpu->uuid, value);
    else if (!strcmp(key, "name"))
        spaced(value), copy(gpu->name, sizeof gpu->name, value);
    else if (!strcmp(key, "bus"))
        copy(gpu->bus, sizeof gpu->bus, value);
    else if (!strcmp(key, "serial"))
        copy(gpu->serial, sizeof gpu->serial, value);
    else if (!strcmp(key, "vbios"))
        copy(gpu->vbios, sizeof gpu->vbios, value);
    else if (!strcmp(key, "cluster"))
        read_uuid(gpu->cluster, value, line);
    else if (!strcmp(key, "cc")) {
        char *dot = strchr(value, '.');
        if (!dot)
            refuse(line, "cc=major.minor expected");
        *dot = 0;
        set_value(gpu, V_cc_major, value, line);
        set_value(gpu, V_cc_minor, dot + 1, line);
    } else if (!strcmp(key, "remap")) {
        char *rest = value, *part = value;
        for (int i = 0; i < 4; i++) {
            char *one = strsep(&rest, ",");
            part = one ? one : part;
            set_value(gpu, V_remap_corrected + i, part, line);
        }
    } else {
        for (int i = 0; i < VALUES_COUNT; i++)
            if (!strcmp(key, value_names[i])) {
                set_value(gpu, i, value, line);
                return;
            }
        refuse(line, "unknown key of a GPU");
    }
}

static void untold(struct gpu *gpu, int key, const char *text) {
    if (!gpu->value[key].told) {
        gpu->value[key] = value_of(text, text);
        gpu->value[key].told = false;
    }
}

static const char *architecture(ull major, ull minor) {
    switch (major) {
    case 3: return "2";
    case 5: return "3";
    case 6: return "4";
    case 7: return minor < 5 ? "5" : "6";
    case 8: return minor < 9 ? "7" : "8";
    case 9: return "9";
    case 10:
    case 12: return "10";
    default: return "0xffffffff";
    }
}

/* What was not told follows from the generation: before Ampere no row remapping, after it no page
 * retirement, fabric from Hopper on. */
static void complete_gpu(struct gpu *gpu) {
    char text[32];
    for (int i = 0; i < VALUES_COUNT; i++) {
        if (i == V_minor || i == V_mig_pending || i == V_arch)
            continue;
        untold(gpu, i, value_texts[i]);
    }
    ull major = gpu->value[V_cc_major].n;
    untold(gpu, V_arch, architecture(major, gpu->value[V_cc_minor].n));
    snprintf(text, sizeof text, "%d", gpu->number);
    untold(gpu, V_minor, text);
    if (!gpu->value[V_mig_pending].told)
        gpu->value[V_mig_pending] = gpu->value[V_mig];
    if (major < 8) {
        for (int i = V_remap_corrected; i <= V_remap_failed; i++)
            untold(gpu, i, "-");
        untold(gpu, V_sram, "-");
        untold(gpu, V_retired, "0");
    }
    if (major < 9)
        untold(gpu, V_fabric, "-");
}

static void read_gpu(struct state *to, const struct line *line) {
    int n = gpu_word(line, 1);
    if (n < 0)
        refuse(line->text, "one GPU expected");
    struct gpu *gpu = &to->gpu[n];
    if (gpu->uuid[0])
        refuse(line->text, "this GPU was told already");
    gpu->number = n;
    snprintf(gpu->uuid, sizeof gpu->uuid, "GPU-00000000-0000-0000-0000-%012d", n);
    snprintf(gpu->bus, sizeof gpu->bus, "00000000:%02X:00.0", 0x10 + n);
    snprintf(gpu->serial, sizeof gpu->serial, "165%010d", n);
    copy(gpu->name, sizeof gpu->name, "NVIDIA H100 80GB HBM3");
    copy(gpu->vbios, sizeof gpu->vbios, "96.00.99.00.01");
    char *key, *value;
    for (int i = 2; (key = pair(line, i, &value)); i++)
        read_gpu_pair(gpu, key, value, line->text);
    complete_gpu(gpu);
    to->gpus++;
}

/* Numbers of a struct by their key; text stands apart. */
struct slot {
    const char *key;
    void *to;
    bool wide;
};

static void read_slots(const struct line *line, int from, const struct slot *slots, char *name,
                       char *uuid) {
    char *key, *value;
    for (int i = from; (key = pair(line, i, &value)); i++) {
        const struct slot *slot = slots;
        if (name && !strcmp(key, "name")) {
            spaced(value);
            copy(name, 96, value);
            continue;
        }
        if (uuid && !strcmp(key, "uuid")) {
            copy(uuid, 96, value);
            continue;
        }
        while (slot->key && strcmp(slot->key, key))
            slot++;
        if (!slot->key)
            refuse(line->text, "unknown key");
        ull n = !strcmp(value, "-1") ? 0xFFFFFFFFull : number(value, line->text);
        if (slot->wide)
            *(ull *)slot->to = n;
        else
            *(uint *)slot->to = (uint)n;
    }
}

static void read_mig(struct state *to, const struct line *line) {
    struct mig *mig = PUSH(to->mig);
    mig->gpu = gpu_word(line, 1);
    mig->slot = -1;
    mig->size = 1;
    const struct slot slots[] = {{"gi", &mig->gi, false},
                                 {"ci", &mig->ci, false},
                                 {"slot", &mig->slot, false},
                                 {"gprofile", &mig->gprofile, false},
                                 {"cprofile", &mig->cprofile, false},
                                 {"start", &mig->start, false},
                                 {"size", &mig->size, false},
                                 {"sm", &mig->sm, false},
                                 {"ce", &mig->ce, false},
                                 {"dec", &mig->dec, false},
                                 {"enc", &mig->enc, false},
                                 {"jpeg", &mig->jpeg, false},
                                 {"ofa", &mig->ofa, false},
                                 {"gi_slices", &mig->gi_slices, false},
                                 {"ci_slices", &mig->ci_slices, false},
                                 {"memory_mb", &mig->memory_mb, true},
                                 {NULL, NULL, false}};
    read_slots(line, 2, slots, mig->name, mig->uuid);
    if (mig->slot < 0) {
        mig->slot = 0;
        for (int i = 0; i < to->mig.count - 1; i++)
            if (to->mig.at[i].gpu == mig->gpu && to->mig.at[i].slot >= mig->slot)
                mig->slot = to->mig.at[i].slot + 1;
    }
}

static void read_gprofile(struct state *to, const struct line *line) {
    struct gprofile *p = PUSH(to->gprofile);
    p->gpu = gpu_word(line, 1);
    const struct slot slots[] = {{"profile", &p->profile, false},
                                 {"id", &p->id, false},
                                 {"p2p", &p->p2p, false},
                                 {"slices", &p->slices, false},
                                 {"instances", &p->instances, false},
                                 {"sm", &p->sm, false},
                                 {"ce", &p->ce, false},
                                 {"dec", &p->dec, false},
                                 {"enc", &p->enc, false},
                                 {"jpeg", &p->jpeg, false},
                                 {"ofa", &p->ofa, false},
                                 {"memory_mb", &p->memory_mb, true},
                                 {NULL, NULL, false}};
    read_slots(line, 2, slots, p->name, NULL);
}

static void read_cprofile(struct state *to, const struct line *line) {
    struct cprofile *p = PUSH(to->cprofile);
    p->gpu = gpu_word(line, 1);
    const struct slot slots[] = {{"gprofile", &p->gprofile, false},
                                 {"profile", &p->profile, false},
                                 {"id", &p->id, false},
                                 {"slices", &p->slices, false},
                                 {"instances", &p->instances, false},
                                 {"sm", &p->sm, false},
                                 {"ce", &p->ce, false},
                                 {"dec", &p->dec, false},
                                 {"enc", &p->enc, false},
                                 {"jpeg", &p->jpeg, false},
                                 {"ofa", &p->ofa, false},
                                 {NULL, NULL, false}};
    read_slots(line, 2, slots, p->name, NULL);
}

static void read_link(struct state *to, const struct line *line) {
    struct link *link = PUSH(to->link);
    link->a = gpu_word(line, 1);
    link->b = gpu_word(line, 2);
    link->level = 50;
    const struct slot slots[] = {{"level", &link->level, false},
                                 {"nvlinks", &link->nvlinks, false},
                                 {"p2p", &link->p2p, false},
                                 {NULL, NULL, false}};
    read_slots(line, 3, slots, NULL, NULL);
}

static void read_nvlink(struct state *to, const struct line *line) {
    struct nvlink *one = PUSH(to->nvlink);
    one->gpu = gpu_word(line, 1);
    one->link = (int)number(word(line, 2), line->text);
    one->state = 1;
    const struct slot slots[] = {
        {"state", &one->state, false}, {"errors", &one->errors, true}, {NULL, NULL, false}};
    read_slots(line, 3, slots, NULL, NULL);
}

static void read_field(struct state *to, const struct line *line) {
    struct field *field = PUSH(to->field);
    field->gpu = gpu_word(line, 1);
    field->type = 1;
    const struct slot slots[] = {{"id", &field->id, false},
                                 {"type", &field->type, false},
                                 {"code", &field->code, false},
                                 {"value", &field->n, true},
                                 {NULL, NULL, false}};
    read_slots(line, 2, slots, NULL, NULL);
}

static void read_event(struct state *to, const struct line *line, bool xid) {
    struct event *event = PUSH(to->event);
    event->type = EVENT_XID;
    event->gi = event->ci = 0xFFFFFFFF;
    uint nowhere = 0;
    const struct slot slots[] = {{"seq", &event->seq, true},
                                 {"gpu", &event->gpu, false},
                                 {"gi", &event->gi, false},
                                 {"ci", &event->ci, false},
                                 {"nowhere", &nowhere, false},
                                 {xid ? "xid" : "data", &event->data, true},
                                 {xid ? NULL : "type", &event->type, true},
                                 {NULL, NULL, false}};
    read_slots(line, 1, slots, NULL, NULL);
    event->nowhere = nowhere;
    if (!event->seq)
        refuse(line->text, "seq= from 1 on expected");
}

static int function_of(const char *name, const char *line) {
    size_t length = strlen(name);
    if (!strcmp(name, "*"))
        return -1;
    for (int i = 0; i < MISUSE_shutdown_in_flight; i++)
        if (!strcmp(row_names[i], name))
            return i;
    for (int i = 0; i < MISUSE_shutdown_in_flight; i++)
        if (!strncmp(row_names[i], name, length) && !strncmp(row_names[i] + length, "_v", 2))
            return i;
    refuse(line, "no such function");
    return -1;
}

static void read_rule(struct state *to, const struct line *line, bool hang) {
    struct rule *rule = PUSH(to->rule);
    copy(rule->text, sizeof rule->text, line->text);
    rule->hang = hang;
    rule->gpu = rule->fn = -1;
    rule->code = UNKNOWN;
    rule->ms = rule->times = -1;
    char *key, *value;
    for (int i = 1; (key = pair(line, i, &value)); i++) {
        if (!strcmp(key, "call"))
            rule->fn = function_of(value, line->text);
        else if (!strcmp(key, "gpu"))
            rule->gpu = !strcmp(value, "*") ? -1 : (int)number(value, line->text);
        else if (!strcmp(key, "code") && !hang)
            rule->code = (int)number(value, line->text);
        else if (!strcmp(key, "ms") && hang)
            rule->ms = (long)number(value, line->text);
        else if (!strcmp(key, "times"))
            rule->times = (long)number(value, line->text);
        else
            refuse(line->text, "unknown key");
    }
}

static void read_lost(struct state *to, const struct line *line) {
    int n = gpu_word(line, 1);
    for (int i = 0; i < GPUS_MAX; i++)
        to->gpu[i].lost |= n < 0 || i == n;
}

static void read_line(struct state *to, const struct line *line) {
    const char *key = line->word[0];
    if (!strcmp(key, "driver"))
        copy(to->driver, sizeof to->driver, word(line, 1));
    else if (!strcmp(key, "cuda"))
        to->cuda = (int)number(word(line, 1), line->text);
    else if (!strcmp(key, "init"))
        to->init = (int)number(word(line, 1), line->text);
    else if (!strcmp(key, "epoch")) {
        to->epoch = (long)number(word(line, 1), line->text);
        if (line->count > 2)
            to->stale_code = (int)number(word(line, 2), line->text);
    } else if (!strcmp(key, "hotplug"))
        to->hotplug = number(word(line, 1), line->text);
    else if (!strcmp(key, "wait_cut"))
        to->wait_cut_ms = (long)number(word(line, 1), line->text);
    else if (!strcmp(key, "gpu"))
        read_gpu(to, line);
    else if (!strcmp(key, "lost"))
        read_lost(to, line);
    else if (!strcmp(key, "mig"))
        read_mig(to, line);
    else if (!strcmp(key, "gprofile"))
        read_gprofile(to, line);
    else if (!strcmp(key, "cprofile"))
        read_cprofile(to, line);
    else if (!strcmp(key, "link"))
        read_link(to, line);
    else if (!strcmp(key, "nvlink"))
        read_nvlink(to, line);
    else if (!strcmp(key, "field"))
        read_field(to, line);
    else if (!strcmp(key, "xid") || !strcmp(key, "event"))
        read_event(to, line, *key == 'x');
    else if (!strcmp(key, "error") || !strcmp(key, "hang"))
        read_rule(to, line, *key == 'h');
    else
        refuse(line->text, "unknown line");
}

static struct state *read_state(const char *path) {
    struct state *to = calloc(1, sizeof *to);
    FILE *file = fopen(path, "re");
    char *raw = NULL, *save;
    size_t room = 0;
    if (!to)
        refuse(path, "no memory");
    copy(to->driver, sizeof to->driver, "580.95.05");
    to->cuda = 13000;
    to->stale_code = DRIVER_NOT_LOADED;
    to->wait_cut_ms = -1;
    to->absent = !file;
    if (!file)
        return to;
    while (getline(&raw, &room, file) >= 0) {
        raw[strcspn(raw, "\n#")] = 0;
        char *kept = strdup(raw);
        struct line line = {.text = kept};
        for (char *at = strtok_r(raw, " \t", &save); at; at = strtok_r(NULL, " \t", &save)) {
            if (line.count == 128)
                refuse(kept, "too many words");
            line.word[line.count++] = at;
        }
        if (line.count)
            read_line(to, &line);
        free(kept);
    }
    for (int i = 0; i < to->gpus; i++)
        if (!to->gpu[i].uuid[0])
            refuse(path, "GPUs are numbered from 0 without holes");
    free(raw);
    fclose(file);
    return to;
}

static void forget(struct state *old) {
    free(old->mig.at);
    free(old->gprofile.at);
    free(old->cprofile.at);
    free(old->link.at);
    free(old->nvlink.at);
    free(old->field.at);
    free(old->rule.at);
    free(old->event.at);
    free(old);
}

/* Read the state if it is another than last time. How often a rule was used stays with its text. */
static void refresh(void) {
    struct stat seen;
    memset(&seen, 0, sizeof seen);
    if (stat(state_path, &seen))
        memset(&seen, 0, sizeof seen);
    if (state && seen.st_ino == state_stat.st_ino && seen.st_size == state_stat.st_size &&
        seen.st_mtim.tv_sec == state_stat.st_mtim.tv_sec &&
        seen.st_mtim.tv_nsec == state_stat.st_mtim.tv_nsec)
        return;
    struct state *fresh = read_state(state_path);
    for (int i = 0; state && i < fresh->rule.count; i++)
        for (int j = 0; j < state->rule.count; j++)
            if (!strcmp(fresh->rule.at[i].text, state->rule.at[j].text))
                fresh->rule.at[i].used = state->rule.at[j].used;
    if (state)
        forget(state);
    state = fresh;
    state_stat = seen;
}

static void open_counts(const char *path) {
    if (!strcmp(path, counts_path))
        return;
    if (counts)
        munmap(counts, sizeof *counts);
    counts = NULL;
    copy(counts_path, sizeof counts_path, path);
    if (!*path)
        return;
    int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0 || ftruncate(file, sizeof *counts))
        refuse(path, "cannot count");
    counts = mmap(NULL, sizeof *counts, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (counts == MAP_FAILED)
        refuse(path, "cannot map");
    for (int i = 0; i < ROWS; i++)
        copy(counts->row[i].name, sizeof counts->row[i].name, row_names[i]);
    counts->rows = ROWS;
    memcpy(counts->magic, "MUNVML1", 8);
}

static void forget_watches(void);

static void look_around(void) {
    const char *path = getenv("MUSTER_FAKE_NVML");
    const char *count = getenv("MUSTER_FAKE_NVML_COUNTS");
    if (strcmp(path ? path : "", state_path)) {
        copy(state_path, sizeof state_path, path ? path : "");
        state_paths++;
        forget_watches();
        memset(&state_stat, 0xFF, sizeof state_stat);
    }
    open_counts(count ? count : "");
}

static void count(int row) {
    if (counts)
        __atomic_add_fetch(&counts->row[row].calls, 1, __ATOMIC_RELAXED);
}

static void arrive(int fn) {
    uint32_t here = (uint32_t)__atomic_add_fetch(&in_flight, 1, __ATOMIC_SEQ_CST);
    pthread_mutex_lock(&door);
    if (references == 0)
        look_around();
    count(fn);
    if (counts && here > counts->peak)
        counts->peak = here;
}

static int leave(int fn, int code) {
    if (code && counts)
        __atomic_add_fetch(&counts->row[fn].failures, 1, __ATOMIC_RELAXED);
    pthread_mutex_unlock(&door);
    __atomic_sub_fetch(&in_flight, 1, __ATOMIC_SEQ_CST);
    return code;
}

/* Waiting for another state: the directory is watched, so that nobody polls. Closing a watch takes
 * milliseconds (the kernel waits for its readers), so they are kept for the next who waits. */
struct watch {
    int file;
    uint path;
};

static int idle_watches[WATCHES_MAX];
static int idle_count;

static void watch_close(struct watch watch) {
    if (watch.file < 0)
        return;
    if (idle_count == WATCHES_MAX || watch.path != state_paths)
        close(watch.file);
    else
        idle_watches[idle_count++] = watch.file;
}

static void forget_watches(void) {
    while (idle_count)
        close(idle_watches[--idle_count]);
}

static struct watch watch_open(void) {
    char directory[sizeof state_path];
    uint mask = IN_MOVED_TO | IN_CLOSE_WRITE | IN_DELETE;
    if (idle_count)
        return (struct watch){idle_watches[--idle_count], state_paths};
    copy(directory, sizeof directory, state_path);
    char *slash = strrchr(directory, '/');
    struct watch watch = {inotify_init1(IN_NONBLOCK | IN_CLOEXEC), state_paths};
    if (slash)
        slash[slash == directory] = 0;
    if (watch.file >= 0 &&
        inotify_add_watch(watch.file, slash ? directory : ".", mask) < 0) {
        close(watch.file);
        watch.file = -1;
    }
    return watch;
}

/* A slice of at most a second, for the state may have become another file's. */
static void watch_wait(struct watch watch, long ms) {
    char drained[4096];
    pthread_mutex_unlock(&door);
    if (watch.file < 0) {
        poll(NULL, 0, ms < 2 ? (int)ms : 2);
    } else {
        struct pollfd on = {.fd = watch.file, .events = POLLIN};
        poll(&on, 1, ms > 1000 ? 1000 : (int)ms);
        while (read(watch.file, drained, sizeof drained) > 0)
            ;
    }
    pthread_mutex_lock(&door);
    refresh();
}

static struct rule *rule_for(bool hang, int fn, int gpu) {
    for (int i = 0; i < state->rule.count; i++) {
        struct rule *rule = &state->rule.at[i];
        bool lifeless = fn <= FN_nvmlShutdown;
        if (rule->hang == hang && (rule->fn == fn || (rule->fn < 0 && !lifeless)) &&
            (rule->gpu < 0 || rule->gpu == gpu) && (rule->times < 0 || rule->used < rule->times))
            return rule;
    }
    return NULL;
}

static bool stands(const char *text) {
    for (int i = 0; i < state->rule.count; i++)
        if (!strcmp(state->rule.at[i].text, text))
            return true;
    return false;
}

static void hang(int fn, int gpu) {
    struct rule *rule = rule_for(true, fn, gpu);
    if (!rule)
        return;
    char text[sizeof rule->text];
    copy(text, sizeof text, rule->text);
    rule->used++;
    long until = rule->ms < 0 ? -1 : now_ms() + rule->ms;
    struct watch watch = watch_open();
    for (refresh(); stands(text); ) {
        long left = until < 0 ? 60000 : until - now_ms();
        if (left <= 0)
            break;
        watch_wait(watch, left);
    }
    watch_close(watch);
}

static int struck(int fn, int gpu) {
    struct rule *rule = rule_for(false, fn, gpu);
    if (!rule)
        return OK;
    rule->used++;
    return rule->code;
}

/* Whether NVML as a whole can be asked. */
static int standing(void) {
    if (references == 0)
        return UNINITIALIZED;
    if (owner != getpid()) {
        count(MISUSE_forked);
        return UNINITIALIZED;
    }
    if (state->absent)
        return DRIVER_NOT_LOADED;
    return state->epoch == epoch_at_init ? OK : state->stale_code;
}

static int begin(int fn) {
    arrive(fn);
    if (references == 0)
        return UNINITIALIZED;
    refresh();
    return standing();
}

static const struct gpu *gpu_of(const char *uuid) {
    for (int i = 0; i < state->gpus; i++)
        if (!strcmp(state->gpu[i].uuid, uuid))
            return &state->gpu[i];
    return NULL;
}

static bool mig_on(const struct gpu *gpu) {
    return gpu->value[V_mig].code == OK && gpu->value[V_mig].n == 1;
}

static const struct mig *mig_where(const struct gpu *gpu, const char *uuid, int gi, int ci) {
    for (int i = 0; mig_on(gpu) && i < state->mig.count; i++) {
        const struct mig *mig = &state->mig.at[i];
        if (mig->gpu == gpu->number && (!uuid || !strcmp(mig->uuid, uuid)) &&
            (gi < 0 || mig->gi == (uint)gi) && (ci < 0 || mig->ci == (uint)ci))
            return mig;
    }
    return NULL;
}

static struct handle *handle_for(enum kind kind, const char *gpu, const struct mig *mig) {
    struct handle *handle;
    for (int i = 0; i < handles_used; i++) {
        handle = &handles[i];
        bool same = handle->kind == kind && handle->generation == generation &&
                    !strcmp(handle->gpu, gpu);
        if (same && (kind == GPU || kind == NOWHERE ||
                     (kind == MIG && !strcmp(handle->mig, mig->uuid)) ||
                     (kind == GI && handle->gi == mig->gi) ||
                     (kind == CI && handle->gi == mig->gi && handle->ci == mig->ci)))
            return handle;
    }
    if (handles_used == HANDLES_MAX)
        return NULL;
    handle = &handles[handles_used++];
    *handle = (struct handle){.kind = kind, .generation = generation};
    copy(handle->gpu, sizeof handle->gpu, gpu);
    if (mig) {
        copy(handle->mig, sizeof handle->mig, mig->uuid);
        handle->gi = mig->gi;
        handle->ci = mig->ci;
    }
    return handle;
}

static int hand_out(void **out, enum kind kind, const char *gpu, const struct mig *mig) {
    if (!out)
        return INVALID_ARGUMENT;
    *out = handle_for(kind, gpu, mig);
    return *out ? OK : NO_MEMORY;
}

static int resolve(void *given, int kinds, struct place *at) {
    uintptr_t offset = (uintptr_t)given - (uintptr_t)handles;
    struct handle *handle = given;
    memset(at, 0, sizeof *at);
    if (!given || (uintptr_t)given < (uintptr_t)handles || offset % sizeof *handle ||
        offset / sizeof *handle >= (uintptr_t)handles_used)
        return INVALID_ARGUMENT;
    if (handle->generation != generation) {
        count(MISUSE_stale_handle);
        return INVALID_ARGUMENT;
    }
    if (!(kinds & (int)handle->kind))
        return INVALID_ARGUMENT;
    at->handle = handle;
    at->gpu = gpu_of(handle->gpu);
    if (!at->gpu)
        return GPU_IS_LOST;
    if (handle->kind == MIG)
        at->mig = mig_where(at->gpu, handle->mig, -1, -1);
    else if (handle->kind == GI)
        at->mig = mig_where(at->gpu, NULL, (int)handle->gi, -1);
    else if (handle->kind == CI)
        at->mig = mig_where(at->gpu, NULL, (int)handle->gi, (int)handle->ci);
    return handle->kind == GPU || at->mig ? OK : INVALID_ARGUMENT;
}

/* What stands against this call on this GPU: hangs, errors as told, the GPU being lost. */
static int trial(int fn, const struct gpu *gpu) {
    char uuid[96] = "";
    int n = gpu ? gpu->number : -1;
    if (gpu)
        copy(uuid, sizeof uuid, gpu->uuid);
    hang(fn, n);
    int code = standing();
    if (!code)
        code = struck(fn, n);
    if (!code && n >= 0) {
        gpu = gpu_of(uuid);
        if (!gpu || gpu->lost)
            code = GPU_IS_LOST;
    }
    return code;
}

static int enter(int fn, void *given, int kinds, struct place *at) {
    int code = begin(fn);
    if (!code)
        code = resolve(given, kinds, at);
    if (!code)
        code = trial(fn, at->gpu);
    return code ? code : resolve(given, kinds, at);
}

static int enter_system(int fn) {
    int code = begin(fn);
    return code ? code : trial(fn, NULL);
}

static int put(char *out, uint size, const char *text) {
    if (!out)
        return INVALID_ARGUMENT;
    if (strlen(text) >= size)
        return INSUFFICIENT_SIZE;
    strcpy(out, text);
    return OK;
}

static int read_value(const struct gpu *gpu, int key, ull *n) {
    *n = gpu->value[key].n;
    return gpu->value[key].code;
}

static int initialise(int fn) {
    arrive(fn);
    if (references && owner != getpid())
        references = 0;
    if (references == 0)
        look_around();
    refresh();
    hang(fn, -1);
    int code = struck(fn, -1);
    if (!code && references == 0) {
        code = state->absent ? DRIVER_NOT_LOADED : state->init;
        if (!code) {
            owner = getpid();
            epoch_at_init = state->epoch;
            latched_count = state->gpus;
            for (int i = 0; i < state->gpus; i++)
                copy(latched[i], sizeof latched[i], state->gpu[i].uuid);
        }
    }
    if (!code)
        references++;
    return leave(fn, code);
}

int nvmlInitWithFlags(uint flags) {
    (void)flags;
    return initialise(FN_nvmlInitWithFlags);
}

int nvmlInit_v2(void) {
    return initialise(FN_nvmlInit_v2);
}

int nvmlShutdown(void) {
    arrive(FN_nvmlShutdown);
    refresh();
    if (references && owner != getpid())
        references = 0;
    if (references == 0)
        return leave(FN_nvmlShutdown, UNINITIALIZED);
    if (__atomic_load_n(&in_flight, __ATOMIC_SEQ_CST) > 1)
        count(MISUSE_shutdown_in_flight);
    hang(FN_nvmlShutdown, -1);
    int code = struck(FN_nvmlShutdown, -1);
    if (!code && references && --references == 0) {
        generation++;
        memset(sets, 0, sizeof sets);
    }
    return leave(FN_nvmlShutdown, code);
}

const char *nvmlErrorString(int code) {
    switch (code) {
    case 0: return "Success";
    case 1: return "Uninitialized";
    case 2: return "Invalid Argument";
    case 3: return "Not Supported";
    case 4: return "Insufficient Permissions";
    case 5: return "Already Initialized";
    case 6: return "Not Found";
    case 7: return "Insufficient Size";
    case 8: return "Insufficient External Power";
    case 9: return "Driver Not Loaded";
    case 10: return "Timeout";
    case 11: return "Interrupt Request Issue";
    case 12: return "NVML Shared Library Not Found";
    case 13: return "Function Not Found";
    case 14: return "Corrupted infoROM";
    case 15: return "GPU is lost";
    case 16: return "GPU requires reset";
    case 17: return "The operating system has blocked the request";
    case 18: return "Driver/library version mismatch";
    case 19: return "In use by another client";
    case 20: return "Insufficient Memory";
    case 21: return "No data";
    case 25: return "Argument version mismatch";
    case 27: return "Not Ready";
    case 28: return "GPU not found";
    default: return "Unknown Error";
    }
}

int nvmlSystemGetDriverVersion(char *out, uint size) {
    int code = enter_system(FN_nvmlSystemGetDriverVersion);
    return leave(FN_nvmlSystemGetDriverVersion, code ? code : put(out, size, state->driver));
}

int nvmlSystemGetNVMLVersion(char *out, uint size) {
    char text[96];
    int code = enter_system(FN_nvmlSystemGetNVMLVersion);
    if (!code) {
        snprintf(text, sizeof text, "%d.%s", state->cuda / 1000, state->driver);
        code = put(out, size, text);
    }
    return leave(FN_nvmlSystemGetNVMLVersion, code);
}

static int cuda_version(int fn, int *out) {
    int code = enter_system(fn);
    if (!code && !out)
        code = INVALID_ARGUMENT;
    if (!code)
        *out = state->cuda;
    return leave(fn, code);
}

int nvmlSystemGetCudaDriverVersion(int *out) {
    return cuda_version(FN_nvmlSystemGetCudaDriverVersion, out);
}

int nvmlSystemGetCudaDriverVersion_v2(int *out) {
    return cuda_version(FN_nvmlSystemGetCudaDriverVersion_v2, out);
}

/* The driver's list of GPUs is that of init, unless `hotplug` says that it follows the file. */
static int listed(void) {
    return state->hotplug ? state->gpus : latched_count;
}

static const char *uuid_at(uint index) {
    return state->hotplug ? state->gpu[index].uuid : latched[index];
}

int nvmlDeviceGetCount_v2(uint *out) {
    int code = enter_system(FN_nvmlDeviceGetCount_v2);
    if (!code && !out)
        code = INVALID_ARGUMENT;
    if (!code)
        *out = (uint)listed();
    return leave(FN_nvmlDeviceGetCount_v2, code);
}

static int hand_out_gpu(int fn, const struct gpu *gpu, void **out) {
    char uuid[96];
    copy(uuid, sizeof uuid, gpu->uuid);
    int code = trial(fn, gpu);
    return code ? code : hand_out(out, GPU, uuid, NULL);
}

int nvmlDeviceGetHandleByIndex_v2(uint index, void **out) {
    int fn = FN_nvmlDeviceGetHandleByIndex_v2;
    int code = begin(fn);
    if (!code && index >= (uint)listed())
        code = INVALID_ARGUMENT;
    if (!code) {
        const struct gpu *gpu = gpu_of(uuid_at(index));
        code = gpu ? hand_out_gpu(fn, gpu, out) : GPU_IS_LOST;
    }
    return leave(fn, code);
}

static bool is_listed(const struct gpu *gpu) {
    for (int i = 0; i < listed(); i++)
        if (!strcmp(uuid_at((uint)i), gpu->uuid))
            return true;
    return false;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **out) {
    int fn = FN_nvmlDeviceGetHandleByUUID;
    int code = begin(fn);
    if (!code && !uuid)
        code = INVALID_ARGUMENT;
    if (code)
        return leave(fn, code);
    code = NOT_FOUND;
    for (int i = 0; i < state->gpus; i++) {
        const struct gpu *gpu = &state->gpu[i];
        const struct mig *mig = mig_where(gpu, uuid, -1, -1);
        if (!is_listed(gpu) || (strcmp(gpu->uuid, uuid) && !mig))
            continue;
        if (!mig)
            return leave(fn, hand_out_gpu(fn, gpu, out));
        char parent[96];
        copy(parent, sizeof parent, gpu->uuid);
        code = trial(fn, gpu);
        gpu = gpu_of(parent);
        mig = gpu ? mig_where(gpu, uuid, -1, -1) : NULL;
        if (!code)
            code = mig ? hand_out(out, MIG, parent, mig) : NOT_FOUND;
        break;
    }
    return leave(fn, code);
}

struct bus {
    uint domain, bus, device;
};

static bool read_bus(const char *text, struct bus *out) {
    return sscanf(text, "%x:%x:%x", &out->domain, &out->bus, &out->device) == 3;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *text, void **out) {
    int fn = FN_nvmlDeviceGetHandleByPciBusId_v2;
    struct bus wanted, had;
    int code = begin(fn);
    if (!code && (!text || !read_bus(text, &wanted)))
        code = INVALID_ARGUMENT;
    if (code)
        return leave(fn, code);
    for (int i = 0; i < state->gpus; i++)
        if (is_listed(&state->gpu[i]) && read_bus(state->gpu[i].bus, &had) &&
            !memcmp(&wanted, &had, sizeof had))
            return leave(fn, hand_out_gpu(fn, &state->gpu[i], out));
    return leave(fn, NOT_FOUND);
}

int nvmlDeviceGetHandleBySerial(const char *serial, void **out) {
    int fn = FN_nvmlDeviceGetHandleBySerial;
    int code = begin(fn);
    if (!code && !serial)
        code = INVALID_ARGUMENT;
    if (code)
        return leave(fn, code);
    for (int i = 0; i < state->gpus; i++)
        if (is_listed(&state->gpu[i]) && !strcmp(state->gpu[i].serial, serial))
            return leave(fn, hand_out_gpu(fn, &state->gpu[i], out));
    return leave(fn, NOT_FOUND);
}

int nvmlDeviceGetUUID(void *device, char *out, uint size) {
    struct place at;
    int code = enter(FN_nvmlDeviceGetUUID, device, GPU | MIG, &at);
    if (!code)
        code = put(out, size, at.mig ? at.mig->uuid : at.gpu->uuid);
    return leave(FN_nvmlDeviceGetUUID, code);
}

int nvmlDeviceGetName(void *device, char *out, uint size) {
    struct place at;
    char text[256];
    int code = enter(FN_nvmlDeviceGetName, device, GPU | MIG, &at);
    if (!code) {
        bool named = at.mig && at.mig->name[0];
        snprintf(text, sizeof text, "%s%s%s", at.gpu->name, named ? " MIG " : "",
                 named ? at.mig->name : "");
        code = put(out, size, text);
    }
    return leave(FN_nvmlDeviceGetName, code);
}

#define TEXT_GETTER(fn, field)                                                                     \
    int fn(void *device, char *out, uint size) {                                                   \
        struct place at;                                                                           \
        int code = enter(FN_##fn, device, GPU, &at);                                               \
        return leave(FN_##fn, code ? code : put(out, size, at.gpu->field));                        \
    }

TEXT_GETTER(nvmlDeviceGetSerial, serial)
TEXT_GETTER(nvmlDeviceGetVbiosVersion, vbios)

#define GETTER(fn, type, key)                                                                      \
    int fn(void *device, type *out) {                                                              \
        struct place at;                                                                           \
        ull n = 0;                                                                                 \
        int code = enter(FN_##fn, device, GPU, &at);                                               \
        if (!code)                                                                                 \
            code = out ? read_value(at.gpu, V_##key, &n) : INVALID_ARGUMENT;                       \
        if (!code)                                                                                 \
            *out = (type)n;                                                                        \
        return leave(FN_##fn, code);                                                               \
    }

GETTER(nvmlDeviceGetMinorNumber, uint, minor)
GETTER(nvmlDeviceGetArchitecture, uint, arch)
GETTER(nvmlDeviceGetBrand, uint, brand)
GETTER(nvmlDeviceGetBoardId, uint, board)
GETTER(nvmlDeviceGetMultiGpuBoard, uint, multi_gpu)
GETTER(nvmlDeviceGetNumaNodeId, uint, numa)
GETTER(nvmlDeviceGetComputeMode, uint, compute_mode)
GETTER(nvmlDeviceGetPersistenceMode, uint, persistence)
GETTER(nvmlDeviceGetNumGpuCores, uint, cores)
GETTER(nvmlDeviceGetPowerUsage, uint, power)
GETTER(nvmlDeviceGetCurrentClocksEventReasons, ull, throttle)
GETTER(nvmlDeviceGetCurrentClocksThrottleReasons, ull, throttle)
GETTER(nvmlDeviceGetRetiredPagesPendingStatus, uint, retired)
GETTER(nvmlDeviceGetPcieReplayCounter, uint, replay)
GETTER(nvmlDeviceGetSupportedEventTypes, ull, events)

int nvmlDeviceGetIndex(void *device, uint *out) {
    struct place at;
    int code = enter(FN_nvmlDeviceGetIndex, device, GPU | MIG, &at);
    if (!code && !out)
        code = INVALID_ARGUMENT;
    for (int i = 0; !code && !at.mig && i < listed(); i++)
        if (!strcmp(uuid_at((uint)i), at.gpu->uuid))
            *out = (uint)i;
    if (!code && at.mig)
        *out = (uint)at.mig->slot;
    return leave(FN_nvmlDeviceGetIndex, code);
}

struct pci {
    char legacy[16];
    uint domain, bus, device, id, subsystem;
    char text[32];
};

static int put_pci(struct pci *out, const char *text, ull id, ull subsystem) {
    struct bus bus;
    if (!out || !read_bus(text, &bus))
        return INVALID_ARGUMENT;
    memset(out, 0, sizeof *out);
    out->domain = bus.domain;
    out->bus = bus.bus;
    out->device = bus.device;
    out->id = (uint)id;
    out->subsystem = (uint)subsystem;
    snprintf(out->legacy, sizeof out->legacy, "%04X:%02X:%02X.0", bus.domain & 0xFFFF,
             bus.bus & 0xFF, bus.device & 0xFF);
    copy(out->text, sizeof out->text, text);
    return OK;
}

int nvmlDeviceGetPciInfo_v3(void *device, struct pci *out) {
    struct place at;
    int code = enter(FN_nvmlDeviceGetPciInfo_v3, device, GPU, &at);
    if (!code)
        code = put_pci(out, at.gpu->bus, at.gpu->value[V_pci_device].n,
                       at.gpu->value[V_pci_subsystem].n);
    return leave(FN_nvmlDeviceGetPciInfo_v3, code);
}

struct memory {
    ull total, free, used;
};

struct memory_v2 {
    uint version;
    ull total, reserved, free, used;
};

static int memory_of(const struct place *at, struct memory_v2 *out) {
    ull total, used, reserved;
    int code = read_value(at->gpu, V_memory, &total);
    if (!code)
        code = read_value(at->gpu, V_used, &used);
    if (code)
        return code;
    reserved = at->gpu->value[V_reserved].n;
    if (at->mig) {
        total = at->mig->memory_mb << 20;
        reserved = used = 0;
    }
    reserved = reserved > total ? 0 : reserved;
    used = used > total - reserved ? total - reserved : used;
    out->total = total;
    out->reserved = reserved;
    out->used = used;
    out->free = total - reserved - used;
    return OK;
}

/* The first version counts what the driver keeps for itself as used. */
int nvmlDeviceGetMemoryInfo(void *device, struct memory *out) {
    struct place at;
    struct memory_v2 seen;
    int code = enter(FN_nvmlDeviceGetMemoryInfo, device, GPU | MIG, &at);
    if (!code)
        code = out ? memory_of(&at, &seen) : INVALID_ARGUMENT;
    if (!code)
        *out = (struct memory){seen.total, seen.free, seen.used + seen.reserved};
    return leave(FN_nvmlDeviceGetMemoryInfo, code);
}

int nvmlDeviceGetMemoryInfo_v2(void *device, struct memory_v2 *out) {
    struct place at;
    int code = enter(FN_nvmlDeviceGetMemoryInfo_v2, device, GPU | MIG, &at);
    if (!code && !out)
        code = INVALID_ARGUMENT;
    if (!code)
        code = out->version == 0x02000028 ? memory_of(&at, out) : VERSION_MISMATCH;
    return leave(FN_nvmlDeviceGetMemoryInfo_v2, code);
}

static int two_values(int fn, void *device, int first, int second, uint *a, uint *b) {
    struct place at;
    ull n = 0, m = 0;
    int code = enter(fn, device, GPU, &at);
    if (!code && (!a || !b))
        code = INVALID_ARGUMENT;
    if (!code)
        code = read_value(at.gpu, first, &n);
    if (!code)
        code = read_value(at.gpu, second, &m);
    if (!code) {
        *a = (uint)n;
        *b = (uint)m;
    }
    return leave(fn, code);
}

int nvmlDeviceGetCudaComputeCapability(void *device, uint *major, uint *minor) {
    int fn = FN_nvmlDeviceGetCudaComputeCapability;
    return two_values(fn, device, V_cc_major, V_cc_minor, major, minor);
}

int nvmlDeviceGetEccMode(void *device, uint *current, uint *pending) {
    return two_values(FN_nvmlDeviceGetEccMode, device, V_ecc_mode, V_ecc_mode, current, pending);
}

int nvmlDeviceGetMigMode(void *device, uint *current, uint *pending) {
    return two_values(FN_nvmlDeviceGetMigMode, device, V_mig, V_mig_pending, current, pending);
}

static bool carved(const struct gpu *gpu) {
    return mig_where(gpu, NULL, -1, -1) != NULL;
}

int nvmlDeviceGetUtilizationRates(void *device, uint *rates) {
    struct place at;
    ull n = 0;
    int code = enter(FN_nvmlDeviceGetUtilizationRates, device, GPU, &at);
    if (!code && !rates)
        code = INVALID_ARGUMENT;
    if (!code)
        code = carved(at.gpu) ? NOT_SUPPORTED : read_value(at.gpu, V_util, &n);
    if (!code)
        rates[0] = rates[1] = (uint)n;
    return leave(FN_nvmlDeviceGetUtilizationRates, code);
}

static uint max_mig(const struct gpu *gpu) {
    return mig_on(gpu) ? (uint)gpu->value[V_max_mig].n : 0;
}

int nvmlDeviceGetMaxMigDeviceCount(void *device, uint *out) {
    struct place at;
    int code = enter(FN_nvmlDeviceGetMaxMigDeviceCount, device, GPU, &at);
    if (!code && !out)
        code = INVALID_ARGUMENT;
    if (!code)
        *out = max_mig(at.gpu);
    return leave(FN_nvmlDeviceGetMaxMigDeviceCount, code);
}

int nvmlDeviceGetMigDeviceHandleByIndex(void *device, uint index, void **out) {
    int fn = FN_nvmlDeviceGetMigDeviceHandleByIndex;
    struct place at;
    int code = enter(fn, device, GPU, &at);
    if (!code && index >= max_mig(at.gpu))
        code = INVALID_ARGUMENT;
    if (code)
        return leave(fn, code);
    for (int i = 0; i < state->mig.count; i++)
        if (state->mig.at[i].gpu == at.gpu->number && state->mig.at[i].slot == (int)index)
            return leave(fn, hand_out(out, MIG, at.gpu->uuid, &state->mig.at[i]));
    return leave(fn, (int)at.gpu->value[V_hole].n);
}

int nvmlDeviceIsMigDeviceHandle(void *device, uint *out) {
    struct place at;
    int code = enter(FN_nvmlDeviceIsMigDeviceHandle, device, GPU | MIG, &at);
    if (!code && !out)
        code = INVALID_ARGUMENT;
    if (!code)
        *out = at.mig != NULL;
    return leave(FN_nvmlDeviceIsMigDeviceHandle, code);
}

#define MIG_GETTER(fn, field)                                                                      \
    int fn(void *device, uint *out) {                                                              \
        struct place at;                                                                           \
        int code = enter(FN_##fn, device, MIG, &at);                                               \
        if (!code && !out)                                                                         \
            code = INVALID_ARGUMENT;                                                               \
        if (!code)                                                                                 \
            *out = at.mig->field;                                                                  \
        return leave(FN_##fn, code);                                                               \
    }

MIG_GETTER(nvmlDeviceGetGpuInstanceId, gi)
MIG_GETTER(nvmlDeviceGetComputeInstanceId, ci)

int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(void *device, void **out) {
    int fn = FN_nvmlDeviceGetDeviceHandleFromMigDeviceHandle;
    struct place at;
    int code = enter(fn, device, MIG, &at);
    return leave(fn, code ? code : hand_out(out, GPU, at.gpu->uuid, NULL));
}

struct attributes {
    uint sm, ce, dec, enc, jpeg, ofa, gi_slices, ci_slices;
    ull memory_mb;
};

int nvmlDeviceGetAttributes_v2(void *device, struct attributes *out) {
    struct place at;
    int code = enter(FN_nvmlDeviceGetAttributes_v2, device, MIG, &at);
    if (!code && !out)
        code = INVALID_ARGUMENT;
    if (!code)
        *out = (struct attributes){at.mig->sm,        at.mig->ce,        at.mig->dec,
                                   at.mig->enc,       at.mig->jpeg,      at.mig->ofa,
                                   at.mig->gi_slices, at.mig->ci_slices, at.mig->memory_mb};
    return leave(FN_nvmlDeviceGetAttributes_v2, code);
}

static const struct gprofile *gprofile_of(const struct gpu *gpu, uint profile) {
    for (int i = 0; gpu->value[V_mig].code == OK && i < state->gprofile.count; i++) {
        const struct gprofile *p = &state->gprofile.at[i];
        if (p->profile == profile && (p->gpu < 0 || p->gpu == gpu->number))
            return p;
    }
    return NULL;
}

static const struct cprofile *cprofile_of(const struct gpu *gpu, uint gprofile, uint profile) {
    for (int i = 0; i < state->cprofile.count; i++) {
        const struct cprofile *p = &state->cprofile.at[i];
        if (p->gprofile == gprofile && p->profile == profile &&
            (p->gpu < 0 || p->gpu == gpu->number))
            return p;
    }
    return NULL;
}

struct gprofile_v1 {
    uint id, p2p, slices, instances, sm, ce, dec, enc, jpeg, ofa;
    ull memory_mb;
};

struct gprofile_v2 {
    uint version, id, p2p, slices, instances, sm, ce, dec, enc, jpeg, ofa;
    ull memory_mb;
    char name[96];
};

static int enter_gprofile(int fn, void *device, uint profile, const struct gprofile **out) {
    struct place at;
    int code = enter(fn, device, GPU, &at);
    if (!code && profile >= GI_PROFILES)
        code = INVALID_ARGUMENT;
    if (!code && !(*out = gprofile_of(at.gpu, profile)))
        code = NOT_SUPPORTED;
    return code;
}

int nvmlDeviceGetGpuInstanceProfileInfo(void *device, uint profile, struct gprofile_v1 *out) {
    const struct gprofile *p;
    int fn = FN_nvmlDeviceGetGpuInstanceProfileInfo;
    int code = enter_gprofile(fn, device, profile, &p);
    if (!code && !out)
        code = INVALID_ARGUMENT;
    if (!code)
        *out = (struct gprofile_v1){p->id, p->p2p, p->slices, p->instances, p->sm,       p->ce,
                                    p->dec, p->enc, p->jpeg,   p->ofa,       p->memory_mb};
    return leave(fn, code);
}

int nvmlDeviceGetGpuInstanceProfileInfoV(void *device, uint profile, struct gprofile_v2 *out) {
    const struct gprofile *p;
    int fn = FN_nvmlDeviceGetGpuInstanceProfileInfoV;
    int code = enter_gprofile(fn, device, profile, &p);
    if (!code && !out)
        code = INVALID_ARGUMENT;
    if (!code && out->version != 0x02000098)
        code = VERSION_MISMATCH;
    if (!code) {
        *out = (struct gprofile_v2){out->version, p->id, p->p2p, p->slices, p->instances,
                                    p->sm,        p->ce, p->dec, p->enc,    p->jpeg,
                                    p->ofa,       p->memory_mb, ""};
        if (p->name[0])
            snprintf(out->name, sizeof out->name, "MIG %.90s", p->name);
    }
    return leave(fn, code);
}

int nvmlDeviceGetGpuInstanceById(void *device, uint id, void **out) {
    struct place at;
    int fn = FN_nvmlDeviceGetGpuInstanceById;
    int code = enter(fn, device, GPU, &at);
    const struct mig *mig = code ? NULL : mig_where(at.gpu, NULL, (int)id, -1);
    if (!code)
        code = mig ? hand_out(out, GI, at.gpu->uuid, mig) : NOT_FOUND;
    return leave(fn, code);
}

struct instance {
    void *device;
    uint id, profile, start, size;
};

struct compute_instance {
    void *device, *gi;
    uint id, profile, start, size;
};

int nvmlGpuInstanceGetInfo(void *instance, struct instance *out) {
    struct place at;
    int fn = FN_nvmlGpuInstanceGetInfo;
    int code = enter(fn, instance, GI, &at);
    const struct gprofile *p = code ? NULL : gprofile_of(at.gpu, at.mig->gprofile);
    if (!code && (!out || !p))
        code = INVALID_ARGUMENT;
    if (!code)
        *out = (struct instance){handle_for(GPU, at.gpu->uuid, NULL), at.mig->gi, p->id,
                                 at.mig->start, at.mig->size};
    return leave(fn, code);
}

struct cprofile_v1 {
    uint id, slices, instances, sm, ce, dec, enc, jpeg, ofa;
};

struct cprofile_v2 {
    uint version, id, slices, instances, sm, ce, dec, enc, jpeg, ofa;
    char name[96];
};

static int enter_cprofile(int fn, void *instance, uint profile, uint engine,
                          const struct cprofile **out) {
    struct place at;
    int code = enter(fn, instance, GI, &at);
    if (!code && (profile >= CI_PROFILES || engine != 0))
        code = INVALID_ARGUMENT;
    if (!code && !(*out = cprofile_of(at.gpu, at.mig->gprofile, profile)))
        code = NOT_SUPPORTED;
    return code;
}

int nvmlGpuInstanceGetComputeInstanceProfileInfo(void *instance, uint profile, uint engine,
                                                 struct cprofile_v1 *out) {
    const struct cprofile *p;
    int fn = FN_nvmlGpuInstanceGetComputeInstanceProfileInfo;
    int code = enter_cprofile(fn, instance, profile, engine, &p);
    if (!code && !out)
        code = INVALID_ARGUMENT;
    if (!code)
        *out = (struct cprofile_v1){p->id,  p->slices, p->instances, p->sm, p->ce,
                                    p->dec, p->enc,    p->jpeg,      p->ofa};
    return leave(fn, code);
}

int nvmlGpuInstanceGetComputeInstanceProfileInfoV(void *instance, uint profile, uint engine,
                                                  struct cprofile_v2 *out) {
    const struct cprofile *p;
    int fn = FN_nvmlGpuInstanceGetComputeInstanceProfileInfoV;
    int code = enter_cprofile(fn, instance, profile, engine, &p);
    if (!code && !out)
        code = INVALID_ARGUMENT;
    if (!code && out->version != 0x02000088)
        code = VERSION_MISMATCH;
    if (!code) {
        *out = (struct cprofile_v2){out->version, p->id,  p->slices, p->instances, p->sm, p->ce,
                                    p->dec,       p->enc, p->jpeg,   p->ofa,       ""};
        if (p->name[0])
            snprintf(out->name, sizeof out->name, "MIG %.90s", p->name);
    }
    return leave(fn, code);
}

int nvmlGpuInstanceGetComputeInstanceById(void *instance, uint id, void **out) {
    struct place at;
    int fn = FN_nvmlGpuInstanceGetComputeInstanceById;
    int code = enter(fn, instance, GI, &at);
    const struct mig *mig = code ? NULL : mig_where(at.gpu, NULL, (int)at.mig->gi, (int)id);
    if (!code)
        code = mig ? hand_out(out, CI, at.gpu->uuid, mig) : NOT_FOUND;
    return leave(fn, code);
}

int nvmlComputeInstanceGetInfo_v2(void *instance, struct compute_instance *out) {
    struct place at;
    int fn = FN_nvmlComputeInstanceGetInfo_v2;
    int code = enter(fn, instance, CI, &at);
    const struct cprofile *p =
        code ? NULL : cprofile_of(at.gpu, at.mig->gprofile, at.mig->cprofile);
    if (!code && (!out || !p))
        code = INVALID_ARGUMENT;
    if (!code)
        *out = (struct compute_instance){handle_for(GPU, at.gpu->uuid, NULL),
                                         handle_for(GI, at.gpu->uuid, at.mig),
                                         at.mig->ci,
                                         p->id,
                                         0,
                                         p->slices};
    return leave(fn, code);
}

static const struct link *link_of(int a, int b) {
    for (int i = 0; i < state->link.count; i++) {
        const struct link *link = &state->link.at[i];
        if ((link->a == a && link->b == b) || (link->a == b && link->b == a))
            return link;
    }
    return NULL;
}

/* Both ends are tried one after the other, so that either may be lost. */
static int enter_pair(int fn, void *one, void *two, struct place *a, struct place *b) {
    int code = enter(fn, one, GPU, a);
    if (!code)
        code = resolve(two, GPU, b);
    if (!code)
        code = trial(fn, b->gpu);
    if (!code)
        code = resolve(one, GPU, a);
    if (!code)
        code = resolve(two, GPU, b);
    return !code && a->gpu == b->gpu ? INVALID_ARGUMENT : code;
}

int nvmlDeviceGetTopologyCommonAncestor(void *one, void *two, uint *out) {
    struct place a, b;
    int fn = FN_nvmlDeviceGetTopologyCommonAncestor;
    int code = enter_pair(fn, one, two, &a, &b);
    if (!code && !out)
        code = INVALID_ARGUMENT;
    if (!code) {
        const struct link *link = link_of(a.gpu->number, b.gpu->number);
        *out = link ? link->level : 50;
    }
    return leave(fn, code);
}

int nvmlDeviceGetP2PStatus(void *one, void *two, uint index, uint *out) {
    struct place a, b;
    int fn = FN_nvmlDeviceGetP2PStatus;
    int code = enter_pair(fn, one, two, &a, &b);
    if (!code && (!out || index > 4))
        code = INVALID_ARGUMENT;
    if (!code) {
        const struct link *link = link_of(a.gpu->number, b.gpu->number);
        bool switched = a.gpu->value[V_switch_links].n && b.gpu->value[V_switch_links].n;
        bool joined = switched || (link && link->nvlinks);
        *out = link && link->p2p ? link->p2p : index == 2 && !joined ? 5 : 0;
    }
    return leave(fn, code);
}

/* A GPU's links are numbered in the order of the link lines, those to switches after them. */
struct wire {
    uint remote, state;
    int peer;
    ull errors;
};

static int wire_of(const struct gpu *gpu, uint number, struct wire *out) {
    int left = (int)number, all = 0;
    *out = (struct wire){REMOTE_SWITCH, 1, -1, 0};
    for (int i = 0; i < state->link.count; i++) {
        const struct link *link = &state->link.at[i];
        int peer = link->a == gpu->number ? link->b : link->b == gpu->number ? link->a : -1;
        if (peer < 0)
            continue;
        all += link->nvlinks;
        if (out->peer < 0 && left < link->nvlinks)
            *out = (struct wire){REMOTE_GPU, 1, peer, 0};
        left -= link->nvlinks;
    }
    all += (int)gpu->value[V_switch_links].n;
    if (all == 0)
        return number < LINKS_MAX ? NOT_SUPPORTED : INVALID_ARGUMENT;
    if ((int)number >= all)
        return INVALID_ARGUMENT;
    for (int i = 0; i < state->nvlink.count; i++)
        if (state->nvlink.at[i].gpu == gpu->number && state->nvlink.at[i].link == (int)number) {
            out->state = state->nvlink.at[i].state;
            out->errors = state->nvlink.at[i].errors;
        }
    return OK;
}

static int enter_wire(int fn, void *device, uint number, const void *out, struct place *at,
                      struct wire *wire) {
    int code = enter(fn, device, GPU, at);
    if (!code && !out)
        code = INVALID_ARGUMENT;
    return code ? code : wire_of(at->gpu, number, wire);
}

#define WIRE_GETTER(fn, type, expression)                                                          \
    int fn(void *device, uint link, type *out) {                                                   \
        struct place at;                                                                           \
        struct wire wire;                                                                          \
        int code = enter_wire(FN_##fn, device, link, out, &at, &wire);                             \
        if (!code)                                                                                 \
            *out = (type)(expression);                                                             \
        return leave(FN_##fn, code);                                                               \
    }

WIRE_GETTER(nvmlDeviceGetNvLinkState, uint, wire.state)
WIRE_GETTER(nvmlDeviceGetNvLinkVersion, uint, at.gpu->value[V_nvlink_version].n)
WIRE_GETTER(nvmlDeviceGetNvLinkRemoteDeviceType, uint, wire.remote)

int nvmlDeviceGetNvLinkCapability(void *device, uint link, uint capability, uint *out) {
    struct place at;
    struct wire wire;
    int fn = FN_nvmlDeviceGetNvLinkCapability;
    int code = enter_wire(fn, device, link, out, &at, &wire);
    if (!code && capability > 5)
        code = INVALID_ARGUMENT;
    if (!code)
        *out = capability == 0 || capability == 2 || capability == 5;
    return leave(fn, code);
}

int nvmlDeviceGetNvLinkErrorCounter(void *device, uint link, uint counter, ull *out) {
    struct place at;
    struct wire wire;
    int fn = FN_nvmlDeviceGetNvLinkErrorCounter;
    int code = enter_wire(fn, device, link, out, &at, &wire);
    if (!code && counter > 4)
        code = INVALID_ARGUMENT;
    if (!code)
        *out = counter == 2 ? wire.errors : 0;
    return leave(fn, code);
}

/* What a link that is down leads to is not known to the driver. */
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *device, uint link, struct pci *out) {
    struct place at;
    struct wire wire;
    char bus[32];
    int fn = FN_nvmlDeviceGetNvLinkRemotePciInfo_v2;
    int code = enter_wire(fn, device, link, out, &at, &wire);
    if (!code && !wire.state)
        code = NOT_SUPPORTED;
    if (!code && wire.peer >= 0)
        code = put_pci(out, state->gpu[wire.peer].bus, 0, 0);
    else if (!code) {
        snprintf(bus, sizeof bus, "00000000:%02X:00.0", 0xF0 + link % 4);
        code = put_pci(out, bus, 0, 0);
    }
    return leave(fn, code);
}

struct fabric {
    unsigned char cluster[16];
    int status;
    uint clique;
    unsigned char state;
};

struct fabric_v3 {
    uint version;
    unsigned char cluster[16];
    int status;
    uint clique;
    unsigned char state;
    uint health;
    unsigned char summary;
};

static int enter_fabric(int fn, void *device, const void *out, struct place *at,
                        struct fabric_v3 *seen) {
    ull n = 0;
    int code = enter(fn, device, GPU, at);
    if (!code)
        code = out ? read_value(at->gpu, V_fabric, &n) : INVALID_ARGUMENT;
    if (code)
        return code;
    memset(seen, 0, sizeof *seen);
    memcpy(seen->cluster, at->gpu->cluster, 16);
    seen->state = (unsigned char)n;
    seen->status = (int)at->gpu->value[V_fabric_status].n;
    seen->clique = (uint)at->gpu->value[V_clique].n;
    seen->health = (uint)at->gpu->value[V_fabric_health].n;
    seen->summary = (unsigned char)at->gpu->value[V_fabric_summary].n;
    return OK;
}

int nvmlDeviceGetGpuFabricInfo(void *device, struct fabric *out) {
    struct place at;
    struct fabric_v3 seen;
    int fn = FN_nvmlDeviceGetGpuFabricInfo;
    int code = enter_fabric(fn, device, out, &at, &seen);
    if (!code) {
        memset(out, 0, sizeof *out);
        memcpy(out->cluster, seen.cluster, 16);
        out->status = seen.status;
        out->clique = seen.clique;
        out->state = seen.state;
    }
    return leave(fn, code);
}

int nvmlDeviceGetGpuFabricInfoV(void *device, struct fabric_v3 *out) {
    struct place at;
    struct fabric_v3 seen;
    int fn = FN_nvmlDeviceGetGpuFabricInfoV;
    int code = enter_fabric(fn, device, out, &at, &seen);
    if (!code && out->version != 0x02000024 && out->version != 0x03000028)
        code = VERSION_MISMATCH;
    if (!code) {
        seen.version = out->version;
        memcpy(out, &seen, out->version & 0xFF);
    }
    return leave(fn, code);
}

struct field_value {
    uint id, scope;
    int64_t timestamp, latency;
    uint type;
    int code;
    union { uint ui; ull ul; unsigned short us; double d; } value;
};

static const struct { uint id; int key; uint type; } field_table[] = {
    {1, V_ecc_mode, 1},           {3, V_ecc_corrected, 3}, {4, V_ecc, 3},
    {31, V_retired, 1},           {82, V_memory_temp, 1},  {94, V_replay, 1},
    {142, V_remap_corrected, 1},  {143, V_remap_uncorrected, 1},
    {144, V_remap_pending, 1},    {145, V_remap_failed, 1},
    {230, V_recovery, 1}};

static void write_union(struct field_value *out, ull n) {
    switch (out->type) {
    case 0: out->value.d = (double)n; break;
    case 1:
    case 5: out->value.ui = (uint)n; break;
    case 6: out->value.us = (unsigned short)n; break;
    default: out->value.ul = n; break;
    }
}

static void field_of(const struct gpu *gpu, struct field_value *out) {
    ull n = 0;
    memset(&out->value, 0, sizeof out->value);
    out->code = NOT_SUPPORTED;
    for (size_t i = 0; i < sizeof field_table / sizeof *field_table; i++)
        if (field_table[i].id == out->id) {
            out->type = field_table[i].type;
            out->code = read_value(gpu, field_table[i].key, &n);
        }
    for (int i = 0; i < state->field.count; i++) {
        const struct field *field = &state->field.at[i];
        if (field->id == out->id && (field->gpu < 0 || field->gpu == gpu->number)) {
            out->type = field->type;
            out->code = field->code;
            n = field->n;
        }
    }
    if (out->code == OK)
        write_union(out, n);
}

int nvmlDeviceGetFieldValues(void *device, int many, struct field_value *out) {
    struct place at;
    struct timespec now;
    int code = enter(FN_nvmlDeviceGetFieldValues, device, GPU, &at);
    if (!code && (!out || many < 1))
        code = INVALID_ARGUMENT;
    clock_gettime(CLOCK_REALTIME, &now);
    for (int i = 0; !code && i < many; i++) {
        out[i].timestamp = now.tv_sec * 1000000LL + now.tv_nsec / 1000;
        out[i].latency = 1;
        field_of(at.gpu, &out[i]);
    }
    return leave(FN_nvmlDeviceGetFieldValues, code);
}

int nvmlDeviceGetRemappedRows(void *device, uint *corrected, uint *uncorrected, uint *pending,
                              uint *failed) {
    struct place at;
    uint *out[4] = {corrected, uncorrected, pending, failed};
    int fn = FN_nvmlDeviceGetRemappedRows;
    int code = enter(fn, device, GPU, &at);
    if (!code && carved(at.gpu))
        code = NOT_SUPPORTED;
    for (int i = 0; !code && i < 4; i++) {
        ull n = 0;
        code = out[i] ? read_value(at.gpu, V_remap_corrected + i, &n) : INVALID_ARGUMENT;
        if (!code)
            *out[i] = (uint)n;
    }
    return leave(fn, code);
}

/* Nothing is remembered beyond the life of the driver: both kinds of counter are one. */
int nvmlDeviceGetTotalEccErrors(void *device, uint type, uint counter, ull *out) {
    struct place at;
    int fn = FN_nvmlDeviceGetTotalEccErrors;
    int code = enter(fn, device, GPU, &at);
    if (!code && (!out || type > 1 || counter > 1))
        code = INVALID_ARGUMENT;
    if (!code && (at.gpu->value[V_ecc_mode].code || !at.gpu->value[V_ecc_mode].n))
        code = NOT_SUPPORTED;
    return leave(fn, code ? code : read_value(at.gpu, type ? V_ecc : V_ecc_corrected, out));
}

int nvmlDeviceGetTemperature(void *device, uint sensor, uint *out) {
    struct place at;
    ull n = 0;
    int code = enter(FN_nvmlDeviceGetTemperature, device, GPU, &at);
    if (!code)
        code = out && sensor == 0 ? read_value(at.gpu, V_temp, &n) : INVALID_ARGUMENT;
    if (!code)
        *out = (uint)n;
    return leave(FN_nvmlDeviceGetTemperature, code);
}

struct temperature {
    uint version, sensor;
    int celsius;
};

int nvmlDeviceGetTemperatureV(void *device, struct temperature *out) {
    struct place at;
    ull n = 0;
    int code = enter(FN_nvmlDeviceGetTemperatureV, device, GPU, &at);
    if (!code)
        code = out && out->sensor == 0 ? read_value(at.gpu, V_temp, &n) : INVALID_ARGUMENT;
    if (!code && out->version != 0x0100000C)
        code = VERSION_MISMATCH;
    if (!code)
        out->celsius = (int)n;
    return leave(FN_nvmlDeviceGetTemperatureV, code);
}

int nvmlDeviceGetTemperatureThreshold(void *device, uint which, uint *out) {
    static const int keys[] = {V_shutdown, V_slowdown, V_memory_max, V_gpu_max};
    struct place at;
    ull n = 0;
    int code = enter(FN_nvmlDeviceGetTemperatureThreshold, device, GPU, &at);
    if (!code && (!out || which > 7))
        code = INVALID_ARGUMENT;
    if (!code)
        code = which < 4 ? read_value(at.gpu, keys[which], &n) : NOT_SUPPORTED;
    if (!code)
        *out = (uint)n;
    return leave(FN_nvmlDeviceGetTemperatureThreshold, code);
}

struct sram {
    uint version;
    ull aggregate[3], volatile_parity, volatile_secded, volatile_corrected, buckets[5];
    uint exceeded;
};

int nvmlDeviceGetSramEccErrorStatus(void *device, struct sram *out) {
    struct place at;
    ull n = 0;
    int code = enter(FN_nvmlDeviceGetSramEccErrorStatus, device, GPU, &at);
    if (!code)
        code = out ? read_value(at.gpu, V_sram, &n) : INVALID_ARGUMENT;
    if (!code && out->version != 0x01000068)
        code = VERSION_MISMATCH;
    if (!code)
        *out = (struct sram){.version = out->version,
                             .aggregate = {n, 0, 0},
                             .volatile_parity = n,
                             .exceeded = (uint)at.gpu->value[V_sram_exceeded].n};
    return leave(FN_nvmlDeviceGetSramEccErrorStatus, code);
}

static struct set *set_of(void *given) {
    uintptr_t offset = (uintptr_t)given - (uintptr_t)sets;
    struct set *set = given;
    if (!given || (uintptr_t)given < (uintptr_t)sets || offset % sizeof *set ||
        offset / sizeof *set >= SETS_MAX)
        return NULL;
    if (!set->used || set->generation != generation) {
        count(MISUSE_stale_set);
        return NULL;
    }
    return set;
}

int nvmlEventSetCreate(void **out) {
    int code = enter_system(FN_nvmlEventSetCreate);
    if (!code && !out)
        code = INVALID_ARGUMENT;
    if (code)
        return leave(FN_nvmlEventSetCreate, code);
    for (int i = 0; i < SETS_MAX; i++) {
        set_last = (set_last + 1) % SETS_MAX;
        if (!sets[set_last].used) {
            sets[set_last] = (struct set){.used = true, .generation = generation};
            *out = &sets[set_last];
            return leave(FN_nvmlEventSetCreate, OK);
        }
    }
    return leave(FN_nvmlEventSetCreate, NO_MEMORY);
}

int nvmlEventSetFree(void *given) {
    int code = enter_system(FN_nvmlEventSetFree);
    struct set *set = code ? NULL : set_of(given);
    if (!code && !set)
        code = INVALID_ARGUMENT;
    if (set && set->waiters)
        count(MISUSE_free_in_flight);
    if (set)
        set->used = false;
    return leave(FN_nvmlEventSetFree, code);
}

static ull last_seq(void) {
    ull last = 0;
    for (int i = 0; i < state->event.count; i++)
        if (state->event.at[i].seq > last)
            last = state->event.at[i].seq;
    return last;
}

/* What happened before is lost. After UNKNOWN the set is of no use any more (nvml.h). */
int nvmlDeviceRegisterEvents(void *device, ull types, void *given) {
    int fn = FN_nvmlDeviceRegisterEvents;
    struct place at;
    ull supported = 0;
    int code = enter(fn, device, GPU, &at);
    struct set *set = references ? set_of(given) : NULL;
    if (!code && !set)
        code = INVALID_ARGUMENT;
    if (code == UNKNOWN && set)
        set->undefined = true;
    if (!code && set->undefined) {
        count(MISUSE_undefined_set);
        code = UNKNOWN;
    }
    if (!code)
        code = read_value(at.gpu, V_events, &supported);
    if (!code && types & ~supported)
        code = NOT_SUPPORTED;
    if (code)
        return leave(fn, code);
    struct registration *on = NULL;
    for (int i = 0; i < set->count; i++)
        if (!strcmp(set->on[i].gpu, at.gpu->uuid))
            on = &set->on[i];
    if (!on && set->count == GPUS_MAX)
        return leave(fn, NO_MEMORY);
    if (!on) {
        on = &set->on[set->count++];
        *on = (struct registration){.seen = last_seq()};
        copy(on->gpu, sizeof on->gpu, at.gpu->uuid);
    }
    on->mask |= types;
    return leave(fn, OK);
}

struct event_data {
    void *device;
    ull type, data;
    uint gi, ci;
};

static const struct event *next_event(struct set *set, struct registration **on) {
    const struct event *next = NULL;
    for (int i = 0; i < set->count; i++) {
        const struct gpu *gpu = gpu_of(set->on[i].gpu);
        for (int j = 0; gpu && j < state->event.count; j++) {
            const struct event *event = &state->event.at[j];
            if (event->gpu == gpu->number && event->type & set->on[i].mask &&
                event->seq > set->on[i].seen && (!next || event->seq < next->seq)) {
                next = event;
                *on = &set->on[i];
            }
        }
    }
    return next;
}

static bool any_lost(const struct set *set) {
    for (int i = 0; i < set->count; i++) {
        const struct gpu *gpu = gpu_of(set->on[i].gpu);
        if (!gpu || gpu->lost)
            return true;
    }
    return false;
}

/* What the set has to say now; TIMEOUT if nothing. News come before the loss they tell of. */
static int heard(struct set *set, struct event_data *out) {
    struct registration *on = NULL;
    const struct event *event = next_event(set, &on);
    if (event) {
        *out = (struct event_data){event->nowhere ? handle_for(NOWHERE, "", NULL)
                                                  : handle_for(GPU, on->gpu, NULL),
                                   event->type, event->data, event->gi, event->ci};
        on->seen = event->seq;
        return OK;
    }
    return any_lost(set) ? GPU_IS_LOST : TIMEOUT;
}

static int listen(struct set *set, struct event_data *out, uint timeout_ms) {
    uint born = generation;
    long end = now_ms() + timeout_ms;
    if (set->waiters++)
        count(MISUSE_two_waiters);
    struct watch watch = watch_open();
    int code;
    refresh();
    for (;;) {
        code = born == generation ? standing() : UNINITIALIZED;
        if (!code)
            code = set->used ? heard(set, out) : INVALID_ARGUMENT;
        long left = end - now_ms();
        if (code != TIMEOUT || left <= 0)
            break;
        watch_wait(watch, left);
    }
    watch_close(watch);
    if (born == generation)
        set->waiters--;
    return code;
}

int nvmlEventSetWait_v2(void *given, struct event_data *out, uint timeout_ms) {
    int fn = FN_nvmlEventSetWait_v2;
    int code = enter_system(fn);
    struct set *set = code ? NULL : set_of(given);
    if (!code && (!set || !out))
        code = INVALID_ARGUMENT;
    if (!code && set->undefined) {
        count(MISUSE_undefined_set);
        code = UNKNOWN;
    }
    if (code)
        return leave(fn, code);
    if (state->wait_cut_ms >= 0 && (long)timeout_ms > state->wait_cut_ms)
        timeout_ms = (uint)state->wait_cut_ms;
    return leave(fn, listen(set, out, timeout_ms));
}
