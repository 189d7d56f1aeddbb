#include "reroute.h"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include "types.h"

namespace echelon {

namespace {

#if defined(__x86_64__)
constexpr unsigned JUMP = R_X86_64_JUMP_SLOT, GLOBAL = R_X86_64_GLOB_DAT;
#elif defined(__aarch64__)
constexpr unsigned JUMP = R_AARCH64_JUMP_SLOT, GLOBAL = R_AARCH64_GLOB_DAT;
#else
constexpr unsigned JUMP = ~0u, GLOBAL = ~0u;
#endif

struct Library {
    std::string name;
    ElfW(Addr) base = 0;
    const ElfW(Dyn)* dynamic = nullptr;
    ElfW(Addr) sealed = 0, sealed_end = 0;  // what is read-only once the library is loaded
};

int look(dl_phdr_info* info, size_t, void* wanted) {
    auto& library = *static_cast<Library*>(wanted);
    const char* slash = strrchr(info->dlpi_name, '/');
    if (strncmp(slash ? slash + 1 : info->dlpi_name, library.name.c_str(), library.name.size()) != 0) return 0;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        auto& part = info->dlpi_phdr[i];
        const ElfW(Addr) at = info->dlpi_addr + part.p_vaddr;
        if (part.p_type == PT_DYNAMIC) library.dynamic = reinterpret_cast<const ElfW(Dyn)*>(at);
        if (part.p_type == PT_GNU_RELRO) library.sealed = at, library.sealed_end = at + part.p_memsz;
    }
    library.base = info->dlpi_addr;
    return library.dynamic != nullptr;
}

struct Slot { void** at; void* to; };

// The places of the library's table from which `detours` are called.
std::vector<Slot> slots(const Library& library, const std::vector<Detour>& detours) {
    const ElfW(Sym)* symbols = nullptr;
    const char* names = nullptr;
    struct Table { ElfW(Addr) at = 0; size_t bytes = 0; } tables[2];
    for (auto* entry = library.dynamic; entry->d_tag != DT_NULL; entry++) {
        auto address = entry->d_un.d_ptr;  // glibc has made it absolute
        switch (entry->d_tag) {
            case DT_SYMTAB: symbols = reinterpret_cast<const ElfW(Sym)*>(address); break;
            case DT_STRTAB: names = reinterpret_cast<const char*>(address); break;
            case DT_JMPREL: tables[0].at = address; break;
            case DT_PLTRELSZ: tables[0].bytes = entry->d_un.d_val; break;
            case DT_RELA: tables[1].at = address; break;
            case DT_RELASZ: tables[1].bytes = entry->d_un.d_val; break;
        }
    }
    std::vector<Slot> found;
    if (symbols == nullptr || names == nullptr) return found;
    for (auto& table : tables) {
        auto* relocation = reinterpret_cast<const ElfW(Rela)*>(table.at);
        for (size_t i = 0; table.at != 0 && i < table.bytes / sizeof(ElfW(Rela)); i++) {
            unsigned kind = ELF64_R_TYPE(relocation[i].r_info);
            if (kind != JUMP && kind != GLOBAL) continue;
            const char* name = names + symbols[ELF64_R_SYM(relocation[i].r_info)].st_name;
            for (auto& detour : detours)
                if (detour.name == name) found.push_back({reinterpret_cast<void**>(library.base + relocation[i].r_offset), detour.to});
        }
    }
    return found;
}

void store(const Library& library, void** at, void* to) {
    const auto page = uintptr_t(sysconf(_SC_PAGESIZE));
    auto begin = reinterpret_cast<char*>(uintptr_t(at) / page * page);
    const bool sealed = uintptr_t(at) >= library.sealed && uintptr_t(at) < library.sealed_end / page * page;
    if (sealed && mprotect(begin, page, PROT_READ | PROT_WRITE) != 0) return;  // it stays as it was
    __atomic_store_n(at, to, __ATOMIC_RELEASE);
    if (sealed) mprotect(begin, page, PROT_READ);
}

bool of_c_library(const char* name) {
    Dl_info about;
    void* at = dlsym(RTLD_DEFAULT, name);
    const char* slash = at != nullptr && dladdr(at, &about) != 0 ? strrchr(about.dli_fname, '/') : nullptr;
    return slash != nullptr && strncmp(slash + 1, "libc.so", 7) == 0;
}

// --- posix_memalign and free of a library, with large blocks from here -------------------------------------------

constexpr size_t LEAST_BYTES = 512 << 10, MOST_ALIGNMENT = 64;
constexpr uint64_t RESERVED_TIMES = 4;  // of the machine's memory: gaps without pages cost addresses alone

Blocks* at_work = nullptr;  // never goes: tensors may outlive everything

int aligned(void** to, size_t alignment, size_t bytes) {
    if (bytes >= LEAST_BYTES && alignment <= MOST_ALIGNMENT)
        if (void* block = at_work->take(bytes)) {
            *to = block;
            return 0;
        }
    return posix_memalign(to, alignment, bytes);
}

void freed(void* at) { at_work->has(at) ? at_work->give(at) : free(at); }

}  // namespace

bool reroute(const std::string& library, const std::vector<Detour>& detours) {
    Library found{library};
    dl_iterate_phdr(look, &found);
    if (found.dynamic == nullptr) return false;
    auto all = slots(found, detours);
    for (auto& detour : detours) {
        bool called = false;
        for (auto& slot : all) called |= slot.to == detour.to;
        if (!called || !of_c_library(detour.name.c_str())) return false;
    }
    for (auto& slot : all) store(found, slot.at, slot.to);
    for (auto& slot : all)
        if (*slot.at != slot.to) return false;
    return true;
}

bool block_memory_of(const std::string& library) {
    static const bool done = [&] {
        rlimit addresses;
        if (JUMP == ~0u || getrlimit(RLIMIT_AS, &addresses) != 0 || addresses.rlim_cur != RLIM_INFINITY) return false;
        try {
            at_work = new Blocks(RESERVED_TIMES * uint64_t(sysconf(_SC_PHYS_PAGES)) * uint64_t(sysconf(_SC_PAGESIZE)));
        } catch (const Error&) {
            return false;
        }
        // free first: it knows its own blocks from those of before
        if (!reroute(library, {{"free", reinterpret_cast<void*>(&freed)}})) return false;
        if (!reroute(library, {{"posix_memalign", reinterpret_cast<void*>(&aligned)}})) return false;
        pthread_atfork([] { at_work->lock(); }, [] { at_work->unlock(); }, [] { at_work->unlock(); });
        return true;
    }();
    return done;
}

Blocks* blocks() { return at_work; }

}  // namespace echelon
