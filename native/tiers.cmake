# The tiers: native/tier.cpp, which holds every kernel, is compiled once for each instruction set, and the process picks one copy
# when it starts (kernels.h). One wheel so runs everywhere.
#
# A tier is its own object library: its flags must reach no other file. What the linker sees of it is kept apart twice:
#
#   * everything in a tier lives in namespace noria::<tier>, so that no two tiers define one symbol;
#   * a tier may define no symbol outside that namespace. An inline function or template of the standard library that it
#     instantiates would be a weak symbol of the whole program: the linker keeps one copy, perhaps the one that was compiled with
#     AVX-512, and a machine without it dies in code that has nothing to do with kernels. check_tier.cmake fails the build then.
#
# -ffp-contract=off: the bits must be the same on every tier, so that only a written fma() is one.
# GCC 12 reports the deliberately undefined operands inside avx512fintrin.h as uninitialised: that warning is off for tiers.

set(NORIA_TIER_FLAGS -O3 -ffp-contract=off -fno-math-errno -Wall -Wextra)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  list(APPEND NORIA_TIER_FLAGS -Wno-uninitialized -Wno-maybe-uninitialized)
endif()

set(NORIA_TIERS generic)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|amd64|AMD64)$")
  list(APPEND NORIA_TIERS avx2 avx512 avx512bf16)
endif()

# cpu_features.cpp asks the CPU for exactly these.
set(NORIA_FLAGS_generic)
set(NORIA_FLAGS_avx2 -mavx2 -mfma -mf16c)
set(NORIA_FLAGS_avx512 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c)
set(NORIA_FLAGS_avx512bf16 ${NORIA_FLAGS_avx512} -mavx512vnni -mavx512bf16)

# Adds the tiers to a module. Where the x86 tiers exist, its sources see NORIA_X86_TIERS.
function(noria_add_tiers module)
  foreach(tier IN LISTS NORIA_TIERS)
    set(library noria_tier_${tier})
    add_library(${library} OBJECT native/tier.cpp)
    target_compile_definitions(${library} PRIVATE NORIA_TIER=${tier})
    target_compile_options(${library} PRIVATE ${NORIA_TIER_FLAGS} ${NORIA_FLAGS_${tier}})
    set_target_properties(${library} PROPERTIES POSITION_INDEPENDENT_CODE ON CXX_VISIBILITY_PRESET hidden)
    target_sources(${module} PRIVATE $<TARGET_OBJECTS:${library}>)
    if(CMAKE_NM)
      add_custom_command(
        TARGET ${module} PRE_LINK VERBATIM
        COMMAND ${CMAKE_COMMAND} -DNM=${CMAKE_NM} -DTIER=${tier} -DOBJECT=$<TARGET_OBJECTS:${library}>
                -P ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/check_tier.cmake)
    endif()
  endforeach()
  if("avx2" IN_LIST NORIA_TIERS)
    target_compile_definitions(${module} PRIVATE NORIA_X86_TIERS=1)
  endif()
endfunction()
