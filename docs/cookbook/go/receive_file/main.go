// Receives a file until the connection ends: receive_file FILE HOST PORT
//
// io.Copy from a *net.TCPConn to an *os.File calls splice since Go 1.21.
package main

import (
	"io"
	"log"
	"net"
	"os"
)

func main() {
	if len(os.Args) != 4 {
		log.Fatal("usage: receive_file FILE HOST PORT")
	}
	conn, err := net.Dial("tcp", net.JoinHostPort(os.Args[2], os.Args[3]))
	if err != nil {
		log.Fatal(err)
	}
	file, err := os.Create(os.Args[1])
	if err != nil {
		log.Fatal(err)
	}
	if _, err := io.Copy(file, conn); err != nil {
		log.Fatal(err)
	}
	if err := file.Close(); err != nil {
		log.Fatal(err)
	}
}
