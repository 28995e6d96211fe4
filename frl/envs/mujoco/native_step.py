"""The simulator's step for native loops: MuJoCo's C functions called row by row by C++, without Python between the steps of a rollout.

The same calls in the same order as :mod:`mujoco.rollout` makes, and so the same bits. Where the data are read by a function of Python's, or the state has
quaternions to be made unit, a loop is called from Python as before.
"""

from __future__ import annotations

import ctypes
import glob
import weakref
from pathlib import Path
from typing import Any

import torch

from frl.envs.mujoco.engine import engine
from frl.envs.mujoco.simulator import LARGEST, SIMULATORS, Simulator
from frl.native.program import Outside, Sym, Unsupported
from frl.one_operation import library

SOURCE = r"""
#include <atomic>
#include <cmath>
#include <csetjmp>
#include <cstdint>
#include <limits>
#include <mutex>
#include <vector>

struct Functions {
  void (*set)(const void*, void*, const double*, int);
  void (*get)(const void*, const void*, double*, int);
  void (*step)(const void*, void*);
  void* (*make)(const void*);
  void (*free)(void*);
  void (**warn)(const char*);
  void* (*error_of_thread)();
  void (*set_error_of_thread)(void*);
};
struct Sizes { int64_t state, speeds_at, speeds, controls, physics, control, warmstart, warnings_at, warnings, threads; };

// Data of a model, one for each thread that steps it at a time.
struct Simulator {
  const void* model;
  Functions f;
  Sizes n;
  double timestep, largest;
  std::mutex lock;
  std::vector<void*> idle;
  void* take() {
    { const std::lock_guard<std::mutex> guard(lock); if (!idle.empty()) { void* d = idle.back(); idle.pop_back(); return d; } }
    return f.make(model);
  }
  void give(void* d) { const std::lock_guard<std::mutex> guard(lock); idle.push_back(d); }
};

extern "C" void* frl_mujoco_new(const void* model, const Functions* f, const Sizes* n, double timestep, double largest) {
  return new Simulator{model, *f, *n, timestep, largest, {}, {}};
}
extern "C" void frl_mujoco_delete(void* simulator) {
  Simulator* const s = (Simulator*)simulator;
  for (void* d : s->idle) s->f.free(d);
  delete s;
}

static thread_local std::jmp_buf* frl_way_out = nullptr;
static void frl_on_error(const char*) { if (frl_way_out) std::longjmp(*frl_way_out, 1); }
static void frl_on_warning(const char*) {}
static std::atomic<int> frl_callers{0};

static bool bounded(const double* x, int64_t n, double bound) {
  for (int64_t i = 0; i < n; ++i) if (!(std::fabs(x[i]) <= bound)) return false;
  return true;
}

// One row; false where it diverged. Nothing in it needs to be destroyed: an error of the engine's jumps out.
static bool play(const Simulator& s, void* d, int64_t frames, double* state, const double* ctrl, const double* rest, double* before) {
  if (!bounded(state + 1, s.n.state, s.largest) || !bounded(ctrl, s.n.controls, s.largest)) return false;
  for (int64_t i = 0; i < s.n.speeds; ++i) before[i] = state[1 + s.n.speeds_at + i];
  s.f.set(s.model, d, state, s.n.physics);
  s.f.set(s.model, d, rest, s.n.warmstart);
  char* const warnings = (char*)d + s.n.warnings_at;  // pairs of ints, the second of which is a number
  for (int64_t i = 0; i < s.n.warnings; ++i) *(int*)(warnings + 8 * i) = 0;
  for (int64_t t = 0; t < frames; ++t) {
    bool warned = false;
    for (int64_t i = 0; i < s.n.warnings; ++i) warned |= *(int*)(warnings + 8 * i) != 0;
    if (warned) break;
    if (s.n.controls) s.f.set(s.model, d, ctrl, s.n.control);
    s.f.step(s.model, d);
  }
  s.f.get(s.model, d, state, s.n.physics);
  if (!(std::fabs(state[0] / s.timestep - frames) < 0.5) || !bounded(state + 1, s.n.state, s.largest)) return false;
  for (int64_t i = 0; i < s.n.speeds; ++i) if (!(std::fabs(state[1 + s.n.speeds_at + i] - before[i]) <= s.largest * s.timestep)) return false;
  return true;
}

template <typename T> static int steps(Simulator& s, const int64_t* numbers, char* const* tensors) {
  const int64_t rows = numbers[0], frames = numbers[1];
  const T* const from = (const T*)tensors[0];
  const T* const controls = (const T*)tensors[1];
  T* const to = (T*)tensors[2];
  if (frames == 0) {
    for (int64_t i = 0; i < rows * s.n.state; ++i) to[i] = from[i];
    return 0;
  }
  // By itself MuJoCo writes each warning into a file. The last caller of several takes our handler away again.
  ++frl_callers;
  if (!*s.f.warn) *s.f.warn = frl_on_warning;
  #pragma omp parallel num_threads(s.n.threads) if (s.n.threads > 1 && rows > 1)
  {
    void* const others = s.f.set_error_of_thread ? s.f.error_of_thread() : nullptr;
    if (s.f.set_error_of_thread) s.f.set_error_of_thread((void*)frl_on_error);
    std::vector<double> state(1 + s.n.state), ctrl(s.n.controls + 1), rest(s.n.speeds, 0.0), before(s.n.speeds);
    void* d = s.take();
    #pragma omp for schedule(dynamic, 2)
    for (int64_t row = 0; row < rows; ++row) {
      state[0] = 0;
      for (int64_t i = 0; i < s.n.state; ++i) state[1 + i] = from[row * s.n.state + i];
      for (int64_t i = 0; i < s.n.controls; ++i) ctrl[i] = controls[row * s.n.controls + i];
      bool good = false;
      std::jmp_buf way_out;
      frl_way_out = &way_out;
      if (setjmp(way_out) == 0) good = play(s, d, frames, state.data(), ctrl.data(), rest.data(), before.data());
      else d = s.f.make(s.model);  // the engine gave up in the middle of the old ones
      frl_way_out = nullptr;
      for (int64_t i = 0; i < s.n.state; ++i) to[row * s.n.state + i] = good ? (T)state[1 + i] : std::numeric_limits<T>::quiet_NaN();
    }
    s.give(d);
    if (s.f.set_error_of_thread) s.f.set_error_of_thread(others);
  }
  if (--frl_callers == 0 && *s.f.warn == frl_on_warning) *s.f.warn = nullptr;
  return 0;
}
extern "C" int frl_mujoco_step_float(void* s, const int64_t* numbers, char* const* tensors) { return steps<float>(*(Simulator*)s, numbers, tensors); }
extern "C" int frl_mujoco_step_double(void* s, const int64_t* numbers, char* const* tensors) { return steps<double>(*(Simulator*)s, numbers, tensors); }
"""
_STEPS = {torch.float32: "frl_mujoco_step_float", torch.float64: "frl_mujoco_step_double"}


class _Functions(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("set", "get", "step", "make", "free", "warn", "error_of_thread", "set_error_of_thread")]


class _Sizes(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int64) for name in ("state", "speeds_at", "speeds", "controls", "physics", "control", "warmstart", "warnings_at", "warnings", "threads")
    ]


def _engine_library() -> Any:
    [path] = glob.glob(str(Path(engine().__file__).parent / "libmujoco.*")) or [None]
    if path is None:
        raise Unsupported("MuJoCo's library is not where its package is")
    return ctypes.CDLL(path)


class NativeSimulator:
    """A simulator as C++ knows it; ends with the object.

    Args:
        simulator: what it steps.
        threads: number of threads.

    Raises:
        Unsupported: a simulator that needs Python, or a release of MuJoCo with other functions.
    """

    def __init__(self, simulator: Simulator, threads: int) -> None:
        if simulator.read is not None or simulator.tangent.quaternions:
            raise Unsupported("a simulator that Python reads or normalises")
        mujoco, self._model = engine(), simulator.model  # which must live as long
        try:
            there = _engine_library()
            address = lambda name: ctypes.cast(getattr(there, name), ctypes.c_void_p).value
            functions = [address(name) for name in ("mj_setState", "mj_getState", "mj_step", "mj_makeData", "mj_deleteData")]
            functions.append(ctypes.addressof(ctypes.c_void_p.in_dll(there, "mju_user_warning")))
            names = ("_mjPRIVATE__get_tls_error_fn", "_mjPRIVATE__set_tls_error_fn")
            functions += [address(name) for name in names] if all(hasattr(there, name) for name in names) else [None, None]
            data, kinds = mujoco.MjData(self._model), mujoco.mjtState
            numbers = data.warning.number
            if numbers.strides != (8,) or numbers.dtype.itemsize != 4:
                raise Unsupported("warnings of another form")
            at = numbers.__array_interface__["data"][0] - data._address
            bits = [int(getattr(kinds, f"mjSTATE_{name}")) for name in ("FULLPHYSICS", "CTRL", "WARMSTART")]
            sizes = _Sizes(simulator.size, simulator.nq, simulator.nv, simulator.nu, *bits, at, len(numbers), threads)
            model = self._model._address
        except (AttributeError, OSError, ValueError) as error:
            raise Unsupported(f"{type(error).__name__}: {error}") from error
        code = library(SOURCE)
        code.frl_mujoco_new.restype = ctypes.c_void_p
        timestep, largest = ctypes.c_double(float(self._model.opt.timestep)), ctypes.c_double(LARGEST)
        self._address = code.frl_mujoco_new(ctypes.c_void_p(model), ctypes.byref(_Functions(*functions)), ctypes.byref(sizes), timestep, largest)
        weakref.finalize(self, code.frl_mujoco_delete, ctypes.c_void_p(self._address))

    def data_ptr(self) -> int:
        """Its address."""
        return self._address


class _Entry:
    """A function of the library."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._name = _STEPS[dtype]

    def data_ptr(self) -> int:
        address = ctypes.cast(getattr(library(SOURCE), self._name), ctypes.c_void_p).value
        assert address is not None
        return address


def native_step(state: Sym, ctrl: Sym, handle: int, frames: int) -> Outside:
    """What the operator ``frl::mujoco_step`` is in native code.

    Raises:
        Unsupported: see :class:`NativeSimulator`.
    """
    if state.dtype not in _STEPS or ctrl.dtype != state.dtype:
        raise Unsupported(f"a simulation in {state.dtype} and {ctrl.dtype}")
    simulator = SIMULATORS[handle]
    threads = simulator.threads or torch.get_num_threads()
    results = [(state.shape, state.dtype), ((state.shape[0], 0), state.dtype)]
    return Outside(_Entry(state.dtype), NativeSimulator(simulator, threads), [state, ctrl], results, [state.shape[0], frames])
