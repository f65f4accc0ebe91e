"""Stands in for Python in tests: asks the warm process for a fork, and ends as that fork ends.

`warm_python.py` puts it into a folder, beside the settings below. It imports little, since it is
started for every process of the tests.
"""

# pathlib and contextlib would take longer to import than all of this.
# ruff: noqa: PTH109, PTH110, PTH120, PTH123, PTH208, SIM105
import _socket as socket
import fcntl
import marshal
import os
import signal
import sys
import time

FOLDER = os.path.dirname(sys.argv[0])
with open(FOLDER + "/settings", "rb") as settings:
    REAL, SERVER, PID, INHERITED, SAME = marshal.load(settings)
"""The interpreter, the program of the warm process, the process that runs the tests; variables that
begin so are read by what a fork has imported already, and these are the ones it has."""
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
NOT_READ_EARLY = {"PYTHONWARNINGS"}


def passed_over(option):
    """Whether a fork has it anyway: from the environment, or from the warm process."""
    return option in ("-u", "-B") or (option[:2] == "-W" and "PYTHONWARNINGS" in os.environ)


def can_be_forked(arguments):
    """Whether a fork does the same as a new interpreter."""
    words = [word for word in arguments if not passed_over(word)]
    if not words or (words[0].startswith("-") and words[0] not in ("-c", "-m")):
        return False
    given = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(INHERITED) and name not in NOT_READ_EARLY
    }
    return given == SAME


def connected():
    """The warm process; whoever comes first starts it."""
    place = FOLDER + "/socket"
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        link.connect(place)
        return link
    except (FileNotFoundError, ConnectionRefusedError):
        pass
    with open(FOLDER + "/lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not os.path.exists(place):
            start_server(lock.fileno())
        while not os.path.exists(place):
            time.sleep(0.01)
    link.connect(place)
    return link


def start_server(lock):
    if os.fork():
        return
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1):
        os.dup2(nothing, stream)
    os.dup2(os.open(FOLDER + "/log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    os.closerange(3, 256)
    os.chdir("/")
    environment = {**SAME, "PATH": os.environ.get("PATH", os.defpath), "OMP_NUM_THREADS": "1"}
    os.execve(REAL, [REAL, SERVER, FOLDER, str(PID)], environment)


def open_files():
    """Those that a new program would inherit; not the one that listed them."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.get_inheritable(int(name)):
                found.append(int(name))
        except OSError:
            pass
    return sorted(found)


def ask(arguments):
    files = open_files()
    network = os.open("/proc/self/ns/net", os.O_RDONLY)
    link = connected()
    ignored = [int(number) for number in FORWARDED if signal.getsignal(number) == signal.SIG_IGN]
    asked = {
        "arguments": arguments,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "cores": list(os.sched_getaffinity(0)),
        "files": files,
        "ignored": ignored,
    }
    text = marshal.dumps(asked)
    rights = b"".join(number.to_bytes(4, sys.byteorder) for number in [*files, network])
    # From here on a fork may run, and be signalled, before this process knows its number.
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    link.sendmsg([len(text).to_bytes(8, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
    link.sendall(text)
    return link


def number_from(link):
    said = b""
    while len(said) < 8:
        more = link.recv(8 - len(said))
        if not more:
            sys.stderr.write("the warm process is gone; " + FOLDER + "/log may say why\n")
            os._exit(70)
        said += more
    return int.from_bytes(said, "big", signed=True)


def main():
    arguments = sys.argv[1:]
    if not can_be_forked(arguments):
        os.execv(REAL, [REAL, *arguments])
    link = ask(arguments)
    process = number_from(link)
    for number in FORWARDED:  # ignored ones too: the fork may have a mind of its own
        signal.signal(number, lambda number, _: os.kill(process, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    for stream in (0, 1, 2):
        try:
            os.close(stream)  # who reads the other end waits for the fork alone
        except OSError:
            pass
    status = number_from(link)
    if status < 0:
        if -status not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


main()
