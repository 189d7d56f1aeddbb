// Copies that leave the cache alone: of what nobody here reads again soon, and the processor need not read what is overwritten whole.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace echelon {

inline void stream(void* dst, const void* src, size_t bytes) {
#if defined(__SSE2__)
    size_t head = -reinterpret_cast<uintptr_t>(dst) % 16;
    if (bytes >= head + 64) {
        std::memcpy(dst, src, head);
        char* to = static_cast<char*>(dst) + head;
        const char* from = static_cast<const char*>(src) + head;
        size_t left = bytes - head;
        for (; left >= 64; left -= 64, to += 64, from += 64)
            for (int i = 0; i < 64; i += 16)
                _mm_stream_si128(reinterpret_cast<__m128i*>(to + i), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
        std::memcpy(to, from, left);
        _mm_sfence();
        return;
    }
#endif
    std::memcpy(dst, src, bytes);
}

}  // namespace echelon
