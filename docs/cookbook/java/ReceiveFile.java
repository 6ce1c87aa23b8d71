import java.net.InetSocketAddress;
import java.nio.ByteBuffer;
import java.nio.channels.FileChannel;
import java.nio.channels.SocketChannel;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;

/** Receives a file until the connection ends: java ReceiveFile.java FILE HOST PORT */
class ReceiveFile {
    public static void main(String[] arguments) throws Exception {
        var address = new InetSocketAddress(arguments[1], Integer.parseInt(arguments[2]));
        // transferFrom would copy in pieces of 8 KiB (Java 17). Java copies a buffer that is not direct.
        var buffer = ByteBuffer.allocateDirect(1 << 20);
        try (var socket = SocketChannel.open(address);
                var file =
                        FileChannel.open(
                                Path.of(arguments[0]),
                                StandardOpenOption.CREATE,
                                StandardOpenOption.TRUNCATE_EXISTING,
                                StandardOpenOption.WRITE)) {
            while (socket.read(buffer) >= 0) {
                buffer.flip();
                while (buffer.hasRemaining()) {
                    file.write(buffer);
                }
                buffer.clear();
            }
        }
    }
}
