"""Runs programs a model wrote, and judges them, without trusting them.

    launch.judge_asserts ─▶ judge process (the tests) ◀══ pipes, plain data ══▶ program process (the model's code)
                 ▲                   │ verdict per test
                 └───────────────────┘
    launch.run_script ───▶ program process: standard input in, standard output out, compared by whoever asked

Both processes are fresh `python -I -S -B` (the standard library, nothing else), confined before they read a byte of the job.

What is guarded, and by what:
- files: Landlock allows reading the interpreter, shared libraries and time zones, and writing to an own empty folder, nothing
  else: no home folder, no /etc/shadow, no /proc, no devices but null, zero and random. What Landlock does not cover (chmod,
  chown, utime, extended attributes, truncating by name or through an open for reading) the system call filter refuses.
- network: no socket can be made (a connected pair of unix streams can, which asyncio needs); beside that an empty network
  namespace where the kernel permits one, and Landlock's own rule for TCP from Linux 6.7.
- processes: no process can be made and no program started, so there is no fork bomb and nothing outlives the kill of the one
  process; signals reach the process itself only; ptrace, other processes' memory, priorities and limits are refused.
- the kernel: mounts, namespaces, modules, BPF, io_uring, keyrings, perf, System V IPC, and every system call newer than those
  known here are refused; all capabilities are dropped, also for root, and cannot come back.
- resources: CPU seconds, wall clock, address space (threads live in it too), size of a file and of the folder, descriptors,
  bytes of output; no core files.
- secrets: the environment is PATH, LANG and HOME (the folder).
- the verdict: tests and expected values never enter the program's process, so there is nothing in its memory to read, and it
  holds no descriptor on which a verdict travels. It answers calls with plain data that is rebuilt on the other side, so an
  object that claims to equal everything arrives as an object that equals no number. Ending early means failing.

What is not guarded: a program may see that a path exists, its own arguments, and the time; it may use CPU and memory up to
its limits; it may answer the calls it sees by a table (tests that are few can be learned); faults of the kernel itself.
The judge runs the dataset's tests, confined in the same way, but they are believed.
"""
