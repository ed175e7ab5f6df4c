// The threads that share the work of a call.

#pragma once

#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>

namespace jaxspec {

inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Threads that share out the iterations of a loop. XLA's own pool takes some 12 us to hand over work,
// as long as a product of five rows; these wait in a busy loop, for a fraction of a millisecond.
// There is one team: a caller that finds it at work runs its loop alone.
class Team {
 public:
  static Team& Get() {
    static Team* const team = new Team();  // never destroyed: its threads run until the process ends
    return *team;
  }

  // Before the first loop. Where no more threads can be had, those that could share the work.
  void Start(int num_threads) {
    if (num_helpers_ > 0) return;
    try {
      for (; num_helpers_ < num_threads - 1; ++num_helpers_) {
        std::thread([this] { Help(); }).detach();
      }
    } catch (const std::system_error&) {
    }
    // A forked child has none of these threads: it works alone.
    pthread_atfork(nullptr, nullptr, [] { Get().num_helpers_ = 0; });
  }

  template <typename Body>
  void For(int64_t count, const Body& body) {
    if (count < 2 || num_helpers_ == 0 || !mutex_.try_lock()) {
      for (int64_t i = 0; i < count; ++i) body(i);
      return;
    }
    run_ = [](const void* body, int64_t i) { (*static_cast<const Body*>(body))(i); };
    body_ = &body;
    num_done_.store(0, std::memory_order_relaxed);
    loop_.store(static_cast<uint64_t>(count) << 32);
    if (num_asleep_.load() > 0) {
      { std::lock_guard<std::mutex> lock(sleep_); }
      wake_.notify_all();
    }
    Work();
    for (int spins = 1; num_done_.load(std::memory_order_acquire) < count; ++spins) Wait(spins);
    mutex_.unlock();
  }

  int64_t num_threads() const { return num_helpers_ + 1; }

 private:
  static constexpr int kSpins = 1 << 14;

  static void Wait(int spins) {
    Pause();
    if (spins % 1024 == 0) std::this_thread::yield();  // more threads than cores: let others finish
  }

  static bool IsOpen(uint64_t loop) { return (loop & 0xffffffffu) < loop >> 32; }

  // Whoever takes an iteration keeps the loop from ending, and with it `run_` and `body_`, until it
  // has been done; one that comes late finds none left, or takes one of the next loop.
  void Work() {
    while (IsOpen(loop_.load(std::memory_order_relaxed))) {
      const uint64_t loop = loop_.fetch_add(1, std::memory_order_acquire);
      if (!IsOpen(loop)) return;
      run_(body_, static_cast<int64_t>(loop & 0xffffffffu));
      num_done_.fetch_add(1, std::memory_order_release);
    }
  }

  void Help() {
    for (;;) {
      for (int spins = 1; !IsOpen(loop_.load(std::memory_order_relaxed)); ++spins) {
        Wait(spins);
        if (spins < kSpins) continue;
        std::unique_lock<std::mutex> lock(sleep_);
        num_asleep_.fetch_add(1);
        wake_.wait(lock, [this] { return IsOpen(loop_.load()); });
        num_asleep_.fetch_sub(1);
      }
      Work();
    }
  }

  int num_helpers_ = 0;
  std::mutex mutex_, sleep_;
  std::condition_variable wake_;
  void (*run_)(const void*, int64_t) = nullptr;
  const void* body_ = nullptr;
  std::atomic<uint64_t> loop_{0};  // number of iterations, and in the low half the next one
  std::atomic<int64_t> num_done_{0};
  std::atomic<int> num_asleep_{0};
};

}  // namespace jaxspec
