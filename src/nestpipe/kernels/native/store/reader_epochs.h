// Epochs: how readers and one writer share a shard without a lock per row.
//
// A reader works in short epochs. Inside one it looks at a shard's `written` flag first; where that
// is set, it puts the key off until the epoch is over. A writer sets the flag, then waits until every
// reader that was inside an epoch has left it. After that nobody reads the shard or its rows, and an
// epoch that begins later sees the flag. Flag and epochs are sequentially consistent: of "writer sets
// the flag, then looks at the epoch" and "reader begins the epoch, then looks at the flag", at least
// one sees the other. A reader pays one exchange per epoch, and nothing per row.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <thread>

namespace nestpipe {

constexpr int kReaders = 128;

class ReaderEpochs {
  struct alignas(64) Slot {
    std::atomic<uint64_t> epoch{0};  // odd: inside one
    std::atomic<bool> taken{false};
  };

 public:
  // One thread that reads, with a slot of its own.
  class Reader {
   public:
    explicit Reader(ReaderEpochs& all) : slot_(all.take_slot()), epoch_(slot_.epoch.load()) {}
    ~Reader() { slot_.taken.store(false, std::memory_order_release); }
    Reader(const Reader&) = delete;
    Reader& operator=(const Reader&) = delete;

    void enter() { slot_.epoch.store(++epoch_, std::memory_order_seq_cst); }
    void leave() { slot_.epoch.store(++epoch_, std::memory_order_release); }

   private:
    Slot& slot_;
    uint64_t epoch_;
  };

  // Returns once every epoch that had begun before has ended.
  void wait_for_readers() const {
    for (const Slot& slot : slots_) {
      const uint64_t epoch = slot.epoch.load(std::memory_order_seq_cst);
      if (epoch % 2 == 0) continue;
      while (slot.epoch.load(std::memory_order_acquire) == epoch) std::this_thread::yield();
    }
  }

 private:
  Slot& take_slot() {
    while (true) {
      for (Slot& slot : slots_) {
        if (!slot.taken.load(std::memory_order_relaxed) &&
            !slot.taken.exchange(true, std::memory_order_acquire)) {
          return slot;
        }
      }
      std::this_thread::yield();
    }
  }

  std::array<Slot, kReaders> slots_;
};

}  // namespace nestpipe
