// A program in Go that echoes, sends a file and lends memory by libhaul, over loopback and with an
// epoll set of its own. Exits with 0, or prints what failed.
package main

// #cgo pkg-config: haul
// #include <haul.h>
// #include <stdlib.h>
// #include <string.h>
//
// extern void goRelease(void *context, void *data, size_t sent, int outcome);
// static int64_t lend(haul_sender *sender, void *data, size_t length, uintptr_t context) {
// 	return haul_lend(sender, data, length, (haul_release)goRelease, (void *)context);
// }
import "C"

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"runtime/cgo"
	"syscall"
	"unsafe"
)

const length = 8 << 20

// A loan is released once, when the kernel does not need the memory any more.
type loan struct {
	released int
	sent     int
	outcome  int
}

//export goRelease
func goRelease(context unsafe.Pointer, _ unsafe.Pointer, sent C.size_t, outcome C.int) {
	loan := cgo.Handle(uintptr(context)).Value().(*loan)
	loan.released++
	loan.sent, loan.outcome = int(sent), int(outcome)
}

// The events of one socket, by epoll and not by the runtime of Go: the completion of a loan is an
// error event, which Go's poller takes for the end of the connection.
type events struct {
	set, socket int
	wanted      uint32
}

func watch(socket int) *events {
	set, err := syscall.EpollCreate1(syscall.EPOLL_CLOEXEC)
	check(err)
	event := syscall.EpollEvent{Fd: int32(socket)}
	check(syscall.EpollCtl(set, syscall.EPOLL_CTL_ADD, socket, &event))
	return &events{set: set, socket: socket}
}

// Waits for the events that the sender wants.
func (events *events) wait(sender *C.haul_sender) {
	// The bits of poll and epoll are equal. EPOLLERR is always reported.
	wanted := uint32(C.haul_sender_wants(sender)) &^ syscall.EPOLLERR
	if wanted != events.wanted {
		event := syscall.EpollEvent{Events: wanted, Fd: int32(events.socket)}
		check(syscall.EpollCtl(events.set, syscall.EPOLL_CTL_MOD, events.socket, &event))
		events.wanted = wanted
	}
	var ready [1]syscall.EpollEvent
	for {
		count, err := syscall.EpollWait(events.set, ready[:], 60000)
		if err == syscall.EINTR {
			continue
		}
		check(err)
		if count == 0 {
			fail("no event arrived")
		}
		break
	}
	if ready[0].Events&syscall.EPOLLERR != 0 && C.haul_on_error_event(sender) < 0 {
		fail("the error event: %s", message())
	}
}

func pattern() []byte {
	data := make([]byte, length)
	for at := range data {
		data[at] = byte(at*131 + at>>8*17)
	}
	return data
}

// A connected pair: a descriptor outside of Go's poller, and a connection of Go.
func pair() (int, net.Conn) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	check(err)
	defer listener.Close()
	client, err := net.Dial("tcp", listener.Addr().String())
	check(err)
	peer, err := listener.Accept()
	check(err)
	// The duplicate that File returns is not in Go's poller.
	file, err := client.(*net.TCPConn).File()
	check(err)
	client.Close()
	socket, err := syscall.Dup(int(file.Fd()))
	check(err)
	file.Close()
	check(syscall.SetNonblock(socket, true))
	return socket, peer
}

func newSender(socket int) *C.haul_sender {
	var sender *C.haul_sender
	if C.haul_sender_new(C.int(socket), nil, &sender) < 0 {
		fail("haul_sender_new: %s", message())
	}
	return sender
}

func sendFile(data []byte) {
	socket, peer := pair()
	received := readAll(peer)
	file, err := os.CreateTemp("", "haul")
	check(err)
	defer os.Remove(file.Name())
	_, err = file.Write(data)
	check(err)
	sender, events := newSender(socket), watch(socket)
	for sent := 0; sent < length; {
		count, err := C.haul_send_file(sender, C.int(file.Fd()), C.uint64_t(sent), C.size_t(length-sent))
		switch {
		case count > 0:
			sent += int(count)
		case err == syscall.EAGAIN:
			events.wait(sender)
		default:
			fail("haul_send_file: %v, %s", err, message())
		}
	}
	// The file ends here.
	if count, err := C.haul_send_file(sender, C.int(file.Fd()), length, 1); count != -1 || err != syscall.ENODATA {
		fail("behind the end of the file: %d, %v", count, err)
	}
	C.haul_sender_free(sender, C.HAUL_LEAVE)
	check(syscall.Close(socket))
	if !bytes.Equal(<-received, data) {
		fail("the file arrived with other bytes")
	}
}

func lend(data []byte) {
	socket, peer := pair()
	received := readAll(peer)
	// The kernel reads the memory after the call, so it must not be memory of Go.
	memory := C.malloc(length)
	C.memcpy(memory, unsafe.Pointer(&data[0]), length)
	sender, events := newSender(socket), watch(socket)
	loans := [3]loan{}
	for at := range loans {
		handle := cgo.NewHandle(&loans[at])
		defer handle.Delete()
		for {
			number, err := C.lend(sender, memory, length, C.uintptr_t(handle))
			if number >= 0 {
				break
			}
			if err != syscall.EAGAIN && err != syscall.ENOBUFS {
				fail("haul_lend: %v, %s", err, message())
			}
			step(sender, events)
		}
	}
	for loans[0].released+loans[1].released+loans[2].released < len(loans) {
		step(sender, events)
	}
	for _, loan := range loans {
		if loan.released != 1 || loan.sent != length {
			fail("a loan was released %d times with %d bytes", loan.released, loan.sent)
		}
	}
	C.haul_sender_free(sender, C.HAUL_LEAVE)
	C.free(memory)
	check(syscall.Close(socket))
	if !bytes.Equal(<-received, bytes.Repeat(data, len(loans))) {
		fail("the lent memory arrived with other bytes")
	}
}

// Sends what is left of a loan, takes loans back, and waits if neither is possible.
func step(sender *C.haul_sender, events *events) {
	flushed, err := C.haul_flush(sender)
	if flushed < 0 && err != syscall.EAGAIN {
		fail("haul_flush: %v, %s", err, message())
	}
	if C.haul_reclaim(sender) == 0 && C.haul_sender_wants(sender) != 0 {
		events.wait(sender)
		C.haul_reclaim(sender)
	}
}

// Echoes what a connection of Go sends, until the connection ends.
func echo(data []byte) {
	socket, peer := pair()
	check(syscall.SetNonblock(socket, false))
	go func() {
		runtime.LockOSThread()
		sender := newSender(socket)
		var receiver *C.haul_receiver
		if C.haul_receiver_new(C.int(socket), &receiver) < 0 {
			fail("haul_receiver_new: %s", message())
		}
		buffer := C.malloc(64 << 10)
		for {
			count, err := C.haul_receive(receiver, buffer, 64<<10)
			if count < 0 {
				fail("haul_receive: %v, %s", err, message())
			}
			if count == 0 {
				break
			}
			for sent := 0; sent < int(count); {
				more := C.haul_send(sender, unsafe.Add(buffer, sent), C.size_t(int(count)-sent), 0)
				if more < 0 {
					fail("haul_send: %s", message())
				}
				sent += int(more)
			}
		}
		C.free(buffer)
		C.haul_receiver_free(receiver)
		C.haul_sender_free(sender, C.HAUL_LEAVE)
		check(syscall.Close(socket))
	}()
	received := readAll(peer)
	_, err := peer.Write(data)
	check(err)
	check(peer.(*net.TCPConn).CloseWrite())
	if !bytes.Equal(<-received, data) {
		fail("the echo has other bytes")
	}
}

func readAll(peer net.Conn) <-chan []byte {
	received := make(chan []byte, 1)
	go func() {
		data, err := io.ReadAll(peer)
		check(err)
		received <- data
	}()
	return received
}

// The message of the latest error, which belongs to the thread of the call.
func message() string {
	return C.GoString(C.haul_error())
}

func check(err error) {
	if err != nil {
		_, file, line, _ := runtime.Caller(1)
		fail("%s:%d: %v", file, line, err)
	}
}

func fail(format string, values ...any) {
	fmt.Fprintf(os.Stderr, format+"\n", values...)
	os.Exit(1)
}

func main() {
	// A message of haul belongs to the thread.
	runtime.LockOSThread()
	data := pattern()
	sendFile(data)
	lend(data)
	echo(data)
}
