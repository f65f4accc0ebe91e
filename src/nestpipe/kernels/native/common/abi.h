// What Python sees: plain C, no exceptions, every pointer owned by the caller unless it says so.
#pragma once

#include <cstdint>

#define NESTPIPE_API extern "C" __attribute__((visibility("default")))

namespace nestpipe {

enum Status : int {
  kOk = 0,
  kTooManyRows = 1,  // a table would outgrow its limit: table, asked and limit say which
  kNoMemory = 2,     // the machine, the container or a ulimit has no more; asked: bytes
  kRepeatedKey = 3,  // a key came twice in one scatter or erase: table and key say which
  kDefect = 4,       // an exception that should not exist
  kUnknownOptimizer = 5,  // a row optimizer that this library has no code for
  kFileFailed = 6,   // key: read (0), write (1) or grow (2) failed; asked: errno
  kFileDamaged = 7,  // a row in the file is not the one that was written, or the file is shorter
};

// How a row's weights are kept; they travel as float32.
enum RowType : int64_t {
  kFloat32 = 0,
  kBfloat16 = 1,
  kFloat16 = 2,
};

// Filled where a call does not return kOk.
struct Report {
  int64_t table;
  int64_t key;
  int64_t asked;
  int64_t limit;
};

struct Shape {
  int64_t num_tables;
  int64_t dim;
  int64_t state_dim;
  RowType row_type;
  float state_init;
  const uint64_t* seeds;    // one per table
  const double* stds;       // one per table
  const int64_t* max_rows;  // one per table; 0: no limit
};

struct Store;

}  // namespace nestpipe

// What control groups leave to this process, in bytes; -1: nothing limits it. The store asks for
// /proc/self/cgroup and /sys/fs/cgroup before it takes memory.
NESTPIPE_API int64_t nestpipe_memory_left(const char* groups, const char* root);

// A new store that belongs to the caller, or null where memory or threads ran out.
NESTPIPE_API nestpipe::Store* nestpipe_store_open(const nestpipe::Shape* shape, int64_t threads);
NESTPIPE_API void nestpipe_store_close(nestpipe::Store* store);

// Keys come grouped by table: counts[t] keys of table t. out holds one row of dim + state_dim
// floats per key. num_new: how many of the keys were never stored.
NESTPIPE_API int nestpipe_store_gather(nestpipe::Store* store, const int64_t* keys,
                                       const int64_t* counts, float* out, int64_t* num_new);
// Where the rows live, null for keys that were never stored. Rows never move; who uses them there
// must not let a scatter or gather of the same rows run at the same time.
NESTPIPE_API int nestpipe_store_locate(nestpipe::Store* store, const int64_t* keys,
                                       const int64_t* counts, void** addresses, int64_t* num_new);
// The same for keys in any order, each with its table.
NESTPIPE_API int nestpipe_store_locate_each(nestpipe::Store* store, const int64_t* keys,
                                            const int32_t* tables, int64_t count,
                                            void** addresses, int64_t* num_new);
NESTPIPE_API int nestpipe_store_scatter(nestpipe::Store* store, const int64_t* keys,
                                        const int64_t* counts, const float* rows,
                                        nestpipe::Report* report);

// Removes rows; keys that were never stored are left alone. erased: how many were. Their places are
// used again by later scatters; who knows where an erased row lived must not use it any more.
NESTPIPE_API int nestpipe_store_erase(nestpipe::Store* store, const int64_t* keys,
                                      const int64_t* counts, int64_t* erased,
                                      nestpipe::Report* report);

NESTPIPE_API int64_t nestpipe_store_num_rows(nestpipe::Store* store, int64_t table);
NESTPIPE_API int64_t nestpipe_store_num_bytes(nestpipe::Store* store);

// The pieces of memory that a table's rows live in, from number `first` on; later ones are added, none
// ever goes. Writes at most `room` of them and returns how many there are in all.
NESTPIPE_API int64_t nestpipe_store_chunks(nestpipe::Store* store, int64_t table, int64_t first,
                                           void** memory, int64_t* bytes, int64_t room);

// The keys of a table in any order; writes at most `room` of them and returns how many there are.
NESTPIPE_API int64_t nestpipe_store_keys(nestpipe::Store* store, int64_t table, int64_t* keys,
                                         int64_t room);
