// Sends a file, by sendfile: send_file FILE HOST PORT
//
// io.Copy from an *os.File to a *net.TCPConn calls sendfile. A wrapper around the file or around the
// connection, such as a bufio.Writer, a counter or TLS, makes io.Copy copy instead.
package main

import (
	"io"
	"log"
	"net"
	"os"
)

func main() {
	if len(os.Args) != 4 {
		log.Fatal("usage: send_file FILE HOST PORT")
	}
	file, err := os.Open(os.Args[1])
	if err != nil {
		log.Fatal(err)
	}
	conn, err := net.Dial("tcp", net.JoinHostPort(os.Args[2], os.Args[3]))
	if err != nil {
		log.Fatal(err)
	}
	if _, err := io.Copy(conn, file); err != nil {
		log.Fatal(err)
	}
	if err := conn.Close(); err != nil {
		log.Fatal(err)
	}
}
