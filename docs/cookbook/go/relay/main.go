// Relays each client to a host, spliced: relay LISTEN_PORT HOST PORT
//
// io.Copy from one *net.TCPConn to another calls splice, also for messages of a few bytes.
package main

import (
	"fmt"
	"io"
	"log"
	"net"
	"os"
)

func main() {
	if len(os.Args) != 4 {
		log.Fatal("usage: relay LISTEN_PORT HOST PORT")
	}
	listener, err := net.Listen("tcp", "127.0.0.1:"+os.Args[1])
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("listening at", listener.Addr())
	for {
		client, err := listener.Accept()
		if err != nil {
			log.Fatal(err)
		}
		go relay(client.(*net.TCPConn), net.JoinHostPort(os.Args[2], os.Args[3]))
	}
}

func relay(client *net.TCPConn, address string) {
	defer client.Close()
	conn, err := net.Dial("tcp", address)
	if err != nil {
		log.Print(err)
		// A reset, so that the client does not take this for the end of a stream.
		client.SetLinger(0)
		return
	}
	server := conn.(*net.TCPConn)
	defer server.Close()
	done := make(chan struct{})
	go func() {
		forward(server, client)
		close(done)
	}()
	forward(client, server)
	<-done
}

// Forwards one direction, and passes on its end.
func forward(to, from *net.TCPConn) {
	if _, err := io.Copy(to, from); err != nil {
		// A reset, so that no peer takes a truncated stream for a whole one.
		to.SetLinger(0)
		to.Close()
		from.SetLinger(0)
		from.Close()
		return
	}
	to.CloseWrite()
}
