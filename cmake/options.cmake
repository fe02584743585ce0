# Compile options shared by every target of ours, and the helper that makes a library from a folder.
add_library(bmt_options INTERFACE)
target_include_directories(bmt_options INTERFACE ${PROJECT_SOURCE_DIR})
target_compile_options(bmt_options INTERFACE -Wall -Wextra -Wpedantic -Wconversion -Wshadow -Wnon-virtual-dtor
                                             -Woverloaded-virtual $<$<BOOL:${BMT_WERROR}>:-Werror>)
if(BMT_SANITIZE_ADDRESS)
  target_compile_options(bmt_options INTERFACE -fsanitize=address,undefined -fno-sanitize-recover=undefined
                                               -fno-omit-frame-pointer)
  target_link_options(bmt_options INTERFACE -fsanitize=address,undefined)
endif()
if(BMT_SANITIZE_THREAD)
  target_compile_options(bmt_options INTERFACE -fsanitize=thread)
  target_link_options(bmt_options INTERFACE -fsanitize=thread)
endif()

# bmt_library(NAME GLOB...): static library bmt_NAME from the sources that match.
function(bmt_library name)
  file(GLOB sources CONFIGURE_DEPENDS ${ARGN})
  add_library(bmt_${name} STATIC ${sources})
  target_link_libraries(bmt_${name} PUBLIC bmt_options)
endfunction()
