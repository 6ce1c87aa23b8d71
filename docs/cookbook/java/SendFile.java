import java.net.InetSocketAddress;
import java.nio.channels.FileChannel;
import java.nio.channels.SocketChannel;
import java.nio.file.Path;

/** Sends a file, by sendfile: java SendFile.java FILE HOST PORT */
class SendFile {
    public static void main(String[] arguments) throws Exception {
        var address = new InetSocketAddress(arguments[1], Integer.parseInt(arguments[2]));
        try (var file = FileChannel.open(Path.of(arguments[0]));
                var socket = SocketChannel.open(address)) {
            long position = 0, length = file.size();
            while (position < length) {
                // From a FileChannel to a SocketChannel, transferTo calls sendfile. Streams copy.
                long sent = file.transferTo(position, length - position, socket);
                if (sent == 0) {
                    throw new java.io.EOFException("the file became shorter");
                }
                position += sent;
            }
        }
    }
}
