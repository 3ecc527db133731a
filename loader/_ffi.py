"""The native core as Python objects. Nothing else imports `loader._native`.

What the core opens belongs to an object here and is released with it: every
call holds a reference to its object, so closing while another thread reads is
safe. A failed call is a `NativeError` with an errno; callers add call, path and
offset.
"""

from __future__ import annotations

import errno
from typing import Any, NamedTuple

from loader import _native
from loader._version import __version__

ffi: Any = _native.ffi
lib: Any = _native.lib

_built = ffi.string(lib.ld_version()).decode()
if _built != __version__:
    raise ImportError(
        f"the compiled module of gguf-dio is version {_built}, its Python code {__version__}; "
        "install the package again"
    )


class NativeError(Exception):
    """A call of the native core failed with `errno`."""

    def __init__(self, number: int) -> None:
        super().__init__(errno.errorcode.get(number, str(number)))
        self.errno = number


def _checked(result: int) -> int:
    if result < 0:
        raise NativeError(-result)
    return result


# --- Files -------------------------------------------------------------------


class FileInfo(NamedTuple):
    """What the core knows of an open file; sizes and alignments in bytes."""

    size: int
    device: int
    inode: int
    memory_alignment: int
    offset_alignment: int
    direct_errno: int
    has_direct: bool
    has_direct_descriptor: bool


class Transfer:
    """Counts what one user of a file reads, and remembers its fallback."""

    __slots__ = ("_struct",)

    def __init__(self, *, direct_required: bool = False, buffered_only: bool = False) -> None:
        self._struct = ffi.new("struct ld_transfer *")
        self._struct.direct_required = direct_required
        self._struct.buffered_only = buffered_only

    @property
    def direct_required(self) -> bool:
        return bool(self._struct.direct_required)

    @property
    def wants_direct(self) -> bool:
        """Whether its reads are direct as far as it is concerned."""
        return not (self._struct.buffered_only or self._struct.fallback_errno)

    @property
    def bytes_direct(self) -> int:
        return int(self._struct.bytes_direct)

    @property
    def bytes_buffered(self) -> int:
        return int(self._struct.bytes_buffered)

    @property
    def bytes_bounced(self) -> int:
        return int(self._struct.bytes_bounced)

    @property
    def fallback_errno(self) -> int:
        """0 when there was no fallback."""
        return int(self._struct.fallback_errno)

    @property
    def fallback_offset(self) -> int:
        return int(self._struct.fallback_offset)

    @property
    def stop_offset(self) -> int:
        """Where the last call stopped."""
        return int(self._struct.stop_offset)


class NativeFile:
    """One `ld_file`: a file that is open for direct and buffered reads."""

    def __init__(self, path: bytes, *, direct: bool) -> None:
        out = ffi.new("ld_file **")
        _checked(lib.ld_file_open(path, direct, out))
        self._file = ffi.gc(out[0], lib.ld_file_close)

    def info(self) -> FileInfo:
        out = ffi.new("struct ld_file_info *")
        lib.ld_file_info(self._file, out)
        return FileInfo(
            out.size,
            out.device,
            out.inode,
            out.memory_alignment,
            out.offset_alignment,
            out.direct_errno,
            bool(out.has_direct),
            bool(out.has_direct_descriptor),
        )

    def pread(self, address: int, room: int, length: int, offset: int, transfer: Transfer) -> int:
        """See ld_file_pread. The caller keeps the memory at `address` alive."""
        destination = ffi.cast("void *", address)
        result = lib.ld_file_pread(self._file, destination, room, length, offset, transfer._struct)
        return _checked(result)

    def read(self, address: int, length: int) -> int:
        """See ld_file_read."""
        return _checked(lib.ld_file_read(self._file, ffi.cast("void *", address), length))

    def seek(self, offset: int, whence: int) -> int:
        return _checked(lib.ld_file_seek(self._file, offset, whence))

    def tell(self) -> int:
        return int(lib.ld_file_tell(self._file))

    def cursor(self) -> Transfer:
        """What the cursor has read so far."""
        transfer = Transfer()
        lib.ld_file_cursor(self._file, transfer._struct)
        return transfer

    def read_ahead(self) -> None:
        """Says that the mapping is going to be read from one end to the other."""
        lib.ld_file_read_ahead(self._file)  # only advice

    def stay_buffered(self) -> None:
        """Gives up direct reads, and the descriptor for them."""
        lib.ld_file_stay_buffered(self._file)

    def resident(self) -> int:
        """Bytes of the file in the page cache. NativeError when that can't be found out."""
        return _checked(lib.ld_file_resident(self._file))

    def check_size(self) -> None:
        """NativeError with ENODATA when the file has become shorter than it was."""
        _checked(lib.ld_file_check_size(self._file))

    def map(self) -> Memory:
        """A read-only mapping of the whole file."""
        out = ffi.new("ld_memory **")
        _checked(lib.ld_map_open(self._file, out))
        return Memory(out[0], writable=False)


# --- Memory ------------------------------------------------------------------


class Memory:
    """A mapping or an arena. It is released when the last view of it is gone:
    numpy keeps the object behind `__array_interface__` alive."""

    def __init__(self, handle: Any, *, writable: bool) -> None:
        self._memory = ffi.gc(handle, lib.ld_memory_close)
        self.address = int(ffi.cast("uintptr_t", lib.ld_memory_address(handle)))
        self.nbytes = int(lib.ld_memory_size(handle))
        self.writable = writable

    @property
    def __array_interface__(self) -> dict[str, object]:
        return {
            "version": 3,
            "typestr": "|u1",
            "shape": (self.nbytes,),
            "data": (self.address, not self.writable),
        }

    def lock(self, offset: int, length: int) -> None:
        """Locks the range into physical memory."""
        _checked(lib.ld_memory_lock(self._memory, offset, length))

    def release(self, offset: int, length: int) -> None:
        """Gives up the whole pages in the range. Nobody may look at them any more."""
        _checked(lib.ld_memory_release(self._memory, offset, length))


def allocate(size: int) -> Memory:
    """Zeroed memory of `size` bytes, aligned to 2 MiB."""
    out = ffi.new("ld_memory **")
    _checked(lib.ld_arena_open(size, out))
    return Memory(out[0], writable=True)


# --- Queues ---------------------------------------------------------------------


class Done(NamedTuple):
    """A request of a queue that is done; see struct ld_request for the result."""

    tag: int
    result: int
    block: int
    transfer: Transfer


class Queue:
    """One `ld_queue`, for one thread. Close it before the memory and files of its requests go."""

    def __init__(self, method: str, *, capacity: int, workers: int) -> None:
        out = ffi.new("ld_queue **")
        number = getattr(lib, f"LD_METHOD_{method.upper()}")
        _checked(lib.ld_queue_open(number, capacity, workers, out))
        self._queue = ffi.gc(out[0], lib.ld_queue_close)
        self._request = ffi.new("struct ld_request *")
        # Kept until the queue is drained.
        self._files: set[NativeFile] = set()
        self._mappings: set[Memory] = set()

    def read(
        self, file: NativeFile, address: int, room: int, length: int, offset: int, tag: int,
        *, direct_required: bool, buffered_only: bool,
    ) -> None:  # fmt: skip
        """Submits a read, as NativeFile.pread."""
        request = self._new(lib.LD_OP_READ, address, length, tag)
        self._files.add(file)
        request.file = file._file
        request.room = room
        request.offset = offset
        request.transfer.direct_required = direct_required
        request.transfer.buffered_only = buffered_only
        _checked(lib.ld_queue_submit(self._queue, request))

    def populate(self, address: int, length: int, tag: int) -> None:
        """Submits fresh memory to be given its pages."""
        request = self._new(lib.LD_OP_POPULATE, address, length, tag)
        _checked(lib.ld_queue_submit(self._queue, request))

    def prefetch(self, mapping: Memory, offset: int, length: int, tag: int, *, exact: bool) -> None:
        """Submits a range of a mapping to be read into memory; exact: without reading ahead."""
        request = self._new(lib.LD_OP_PREFETCH, 0, length, tag)
        request.type = exact
        request.map = mapping._memory
        request.offset = offset
        self._mappings.add(mapping)
        _checked(lib.ld_queue_submit(self._queue, request))

    def check(self, type_id: int, address: int, length: int, tag: int) -> None:
        """Submits tensor data to be checked."""
        request = self._new(lib.LD_OP_CHECK, address, length, tag)
        request.type = type_id
        _checked(lib.ld_queue_submit(self._queue, request))

    def _new(self, operation: int, address: int, length: int, tag: int) -> Any:
        request = self._request
        ffi.memmove(request, _EMPTY_REQUEST, ffi.sizeof("struct ld_request"))
        request.operation = operation
        request.address = ffi.cast("void *", address)
        request.length = length
        request.tag = tag
        return request

    def wait(self, milliseconds: int) -> Done | None:
        """A request that is done, or None after that time or when a signal came."""
        found = lib.ld_queue_wait(self._queue, milliseconds, self._request)
        if found == 1:
            done = self._request
            transfer = Transfer()
            transfer._struct[0] = done.transfer
            return Done(done.tag, done.result, done.block, transfer)
        if found < 0 and found != -errno.EINTR:
            raise NativeError(-found)
        return None

    def close(self) -> None:
        """Waits for what is under way and drops the rest."""
        ffi.release(self._queue)
        self._files.clear()
        self._mappings.clear()


_EMPTY_REQUEST = ffi.new("struct ld_request *")


class WritableBuffer:
    """The memory of an object that a caller gave us to fill.

    TypeError when it has none, ValueError when it is read-only or not contiguous.
    """

    __slots__ = ("_view", "address", "nbytes")

    def __init__(self, source: object) -> None:
        try:
            self._view = ffi.from_buffer("unsigned char[]", source, require_writable=True)
        except (BufferError, ValueError) as error:
            raise ValueError(f"can't read into this buffer: {error}") from None
        self.address = int(ffi.cast("uintptr_t", self._view))
        self.nbytes = len(self._view)


# --- The header ---------------------------------------------------------------


class Problem(NamedTuple):
    """What a scan found wrong; see struct ld_gguf_problem.

    code: the name of its code without the prefix; number: its index.
    """

    code: str
    in_tensors: bool
    number: int
    offset: int
    value: int
    limit: int
    name_offset: int
    name_length: int


_PROBLEM_PREFIX = "LD_GGUF_"
_PROBLEM_CODES = {
    value: name.removeprefix(_PROBLEM_PREFIX)
    for value, name in ffi.typeof("enum ld_gguf_problem_code").elements.items()
}


class TypeTable:
    """Block sizes by type id, as the scan wants them: (elements, bytes) of a block."""

    __slots__ = ("_array",)

    def __init__(self, sizes: dict[int, tuple[int, int]]) -> None:
        self._array = ffi.new("struct ld_gguf_type[]", max(sizes) + 1)
        for type_id, (elements, nbytes) in sizes.items():
            self._array[type_id] = (elements, nbytes)


class Scan:
    """The scan of one header; its tables are copied out as bytes."""

    def __init__(self, file_size: int) -> None:
        out = ffi.new("struct ld_gguf **")
        _checked(lib.ld_gguf_open(file_size, out))
        self._scan = ffi.gc(out[0], lib.ld_gguf_close)

    def run(self, memory: Memory, length: int, types: TypeTable) -> Problem | int:
        """Scans the first `length` bytes of the file, which are in `memory`.

        Returns 0 when the header is complete, how many bytes of the file are
        needed at least when it isn't, or what is wrong.
        """
        status = lib.ld_gguf_scan(
            self._scan,
            ffi.cast("const uint8_t *", memory.address),
            length,
            types._array,
            len(types._array),
        )
        if status == lib.LD_GGUF_DONE:
            return 0
        if status == lib.LD_GGUF_MORE:
            return int(self._scan.needed)
        if status == -errno.EBADMSG:
            return self._problem()
        raise NativeError(-status)

    def _problem(self) -> Problem:
        found = self._scan.problem
        return Problem(
            _PROBLEM_CODES[found.code],
            bool(found.in_tensors),
            found.index,
            found.offset,
            found.value,
            found.limit,
            found.name_offset,
            found.name_length,
        )

    @property
    def version(self) -> int:
        return int(self._scan.version)

    @property
    def end(self) -> int:
        """Where the header ends, in bytes."""
        return int(self._scan.position)

    def keys(self) -> bytes:
        """The table of struct ld_gguf_key."""
        length = self._scan.keys_length * ffi.sizeof("struct ld_gguf_key")
        return bytes(ffi.buffer(self._scan.keys, length)) if length else b""

    def tensors(self) -> bytes:
        """The table of struct ld_gguf_tensor."""
        length = self._scan.tensors_length * ffi.sizeof("struct ld_gguf_tensor")
        return bytes(ffi.buffer(self._scan.tensors, length)) if length else b""


def string_offsets(header: Any, offset: int, count: int, out: Any) -> None:
    """Fills `out` (count + 1 entries of uint64) with where the strings of an array lie."""
    view = ffi.from_buffer("const uint8_t[]", header)
    offsets = ffi.from_buffer("uint64_t[]", out, require_writable=True)
    _checked(lib.ld_gguf_strings(view, len(view), offset, count, offsets))


# --- Validation ----------------------------------------------------------------


def first_invalid_block(type_id: int, data: Any) -> int | None:
    """The first block in `data` with a NaN or infinite value or scale, or None.

    NativeError with EOPNOTSUPP for a type without a rule.
    """
    view = ffi.from_buffer("const uint8_t[]", data)
    block = ffi.new("uint64_t *")
    found = _checked(lib.ld_rows_check(type_id, view, len(view), block))
    return int(block[0]) if found else None


# --- Faults, for tests -----------------------------------------------------------


def fault_add(
    call: str, *, nth: int = 1, times: int = 1 << 62, error: int = 0, limit: int = 0
) -> None:
    """From the nth call of a kind ("pread_direct", "mmap", ...) on, `times` of them fail
    with `error`, or, without one, transfer at most `limit` bytes."""
    _checked(lib.ld_fault_add(_call(call), nth, times, error, limit))


def fault_clear() -> None:
    """Drops all faults and counts."""
    lib.ld_fault_clear()


def fault_count(call: str) -> int:
    """How many calls of a kind were made since the first fault was added."""
    return int(lib.ld_fault_count(_call(call)))


def _call(name: str) -> int:
    return int(getattr(lib, f"LD_CALL_{name.upper()}"))
